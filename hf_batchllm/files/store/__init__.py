"""The bytes on the disk: reading lines, writing results, and going on after a crash."""
