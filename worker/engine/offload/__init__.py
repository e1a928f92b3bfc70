"""KV blocks kept beside the KV cache, in host memory and in a folder, to be read instead of computed."""
