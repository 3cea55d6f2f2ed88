"""Reading model weights from disk into a decoder."""
