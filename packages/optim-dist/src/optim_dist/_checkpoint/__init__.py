"""Behind ``checkpoint``: what its files hold, what they say of themselves, and how it comes to other ranks."""
