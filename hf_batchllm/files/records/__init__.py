"""What a line of a file means, and the line that answers it."""
