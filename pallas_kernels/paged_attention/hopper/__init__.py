"""What the Mosaic GPU kernel for Hopper is made of."""
