"""What a notebook shows of a plan, a report and a result: HTML with pictures in it. No torch, and no plotting library.

Each view stands by itself: a style sheet that means nothing outside of it, inline SVG, no script, nothing to fetch.
Where styles are taken away (as by a viewer of notebooks that nobody has trusted yet) a plain text stands instead.
"""
