"""What a run tells people: progress and footer; and machines: one record a prompt."""
