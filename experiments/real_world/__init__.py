"""Questions about the real world without a download: places, elements, currencies, languages and sums."""
