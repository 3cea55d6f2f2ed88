"""DynaKV (arXiv 2603.04411): keys and values in a learned basis, each token at a rank of its own.

Imported part by part, since the settings have to be there before JAX is.
"""
