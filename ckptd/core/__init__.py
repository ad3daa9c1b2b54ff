"""The rules, without any effect: values, completeness, policy."""
