"""The text that is computed with when none is given: prose, numbers, code and other scripts, so that routers choose widely."""

TEXT = """\
The keeper of the lighthouse counted the ships twice, wrote 41 in the book, and went down to the harbour before the fog came in. \
Two of them carried timber, one had been at sea since March, and nobody could say what lay in the holds of the others.

def median(values):
    ordered = sorted(values)
    middle, odd = divmod(len(ordered), 2)
    return ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2

Water boils at 100 degrees Celsius at sea level; on a mountain of 3,000 metres it needs only 90. Cooks who move there find their beans \
hard. Der Wind drehte gegen Abend, und die Fischer blieben im Hafen. Les enfants comptaient les étoiles jusqu'à s'endormir. \
La biblioteca cierra a las ocho. 春になると、川の水が増える。 Зимой здесь рано темнеет.

1. Measure twice. 2. Cut once. 3. Sweep the floor, and put every tool where it was.

SELECT name, COUNT(*) AS n FROM orders WHERE placed_at >= '2024-01-01' GROUP BY name HAVING n > 5 ORDER BY n DESC;

"Why did the bridge hold?" she asked. "It was built for trains," he said, "and the trains never came." They walked across it in silence. \
The theorem says that every integer above one is a product of primes in exactly one way: 360 = 2 * 2 * 2 * 3 * 3 * 5. An enzyme lowers the \
energy that a reaction needs and is itself not used up. The court found that the contract was void, since one party had signed under \
threat. In the third movement the cello takes over the melody from the oboe, a fourth lower and half as fast. Prices rose by 2.5 % in the \
first quarter, wages by 1.9 %, rents by 6 %. Mix 250 g of flour with a pinch of salt, rub in the butter, and let the dough rest for an hour.
"""
