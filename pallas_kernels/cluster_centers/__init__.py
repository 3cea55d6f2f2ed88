"""K-means over the keys of a segment."""
