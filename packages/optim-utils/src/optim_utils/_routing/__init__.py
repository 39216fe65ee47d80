"""Behind ``param_groups``: where a parameter goes, and which matrices lie in it."""
