"""The process on a stage box: configuration, ring, HTTP, admin socket, life cycle."""
