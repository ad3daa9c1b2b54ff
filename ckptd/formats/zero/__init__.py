"""Which bytes of which rank make which parameter."""
