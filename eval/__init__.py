"""Quality and speed measurements, imported as `kvjax.eval`."""
