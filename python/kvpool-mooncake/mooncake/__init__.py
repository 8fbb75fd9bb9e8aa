"""The modules of Mooncake Store, implemented over kvpool."""
