"""Code that the connectors for inference engines share: settings, connection, leases."""
