"""Behind ``low_bit``: formats, the maps between numbers and codes, blocks with scales, and the tensor made of them."""
