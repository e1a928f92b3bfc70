"""Who may call the gateway: keys, tenants, web pages."""
