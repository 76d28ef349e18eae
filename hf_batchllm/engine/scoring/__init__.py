"""How likely given continuations are: a call that looks tokens up instead of picking them."""
