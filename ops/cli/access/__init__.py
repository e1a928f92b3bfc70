"""Commands on keys, secrets and the audit."""
