"""Which tokens are computed once, which pages hold them and what runs next. Never imports torch."""
