"""The modules that deployments of Mooncake Store import, over kvpool."""
