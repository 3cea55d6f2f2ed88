"""ThinKV's thoughts: how sparse attention is, and what that says about a segment's kind."""
