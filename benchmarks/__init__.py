"""Scripts of the repository that measure and show: claims, pages of evidence, soaks. They are not in the wheel."""
