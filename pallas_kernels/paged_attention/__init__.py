"""One query a row against the live slots of its pages."""
