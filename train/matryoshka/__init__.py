"""Training of MatryoshkaKV (arXiv 2410.14731), a baseline that DynaKV is compared with."""
