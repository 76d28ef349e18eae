"""Plans, reports and results as HTML for a notebook."""
