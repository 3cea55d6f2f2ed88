"""Training of DynaKV's bases and gates, imported as `kvjax.train.dynakv`."""
