"""What the plugins for inference engines share: their settings, their way to the pool, their leases."""
