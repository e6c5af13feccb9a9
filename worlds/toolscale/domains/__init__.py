"""The built-in domains, a file each."""
