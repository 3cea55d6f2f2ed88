"""What the command lines share: options, prompts, output, interrupts and exit codes."""
