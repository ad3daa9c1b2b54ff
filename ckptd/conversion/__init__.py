"""Plans of conversions: ZeRO shards into the universal form or into weights."""
