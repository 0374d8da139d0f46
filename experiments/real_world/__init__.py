"""Questions about the real world, from packages that bring data: places, elements, currencies, languages; and sums."""
