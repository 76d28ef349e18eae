"""What people get back: plans, generations, reports, scores, timelines. Never imports torch."""
