"""One call: from a checked job to finished requests."""
