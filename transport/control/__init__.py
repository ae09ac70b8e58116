"""The control plane: small, typed, authenticated messages between processes (msgspec over TCP or Unix sockets)."""
