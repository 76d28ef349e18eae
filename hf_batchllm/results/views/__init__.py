"""Plans, reports and results as pictures in a notebook."""
