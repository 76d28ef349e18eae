"""The bytes on the disk: reading lines, writing results, continuing after a crash."""
