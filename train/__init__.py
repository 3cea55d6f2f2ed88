"""Training loops of the learned compressors, imported as `kvjax.train`."""
