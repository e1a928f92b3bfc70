"""The engine cores: from requests to tokens, step by step, without process, socket or clock."""
