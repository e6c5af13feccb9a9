"""The HTTP server: OpenAI's API on the engine, and the loop behind it with the server's tools."""
