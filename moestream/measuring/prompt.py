"""The text whose tokens ``moestream bench`` asks models to go on from."""

# Written for this purpose: several kinds of text, since which experts are chosen depends on it.
TEXT = """\
The harbour master kept two books. In the first he wrote the ships that came in, their cargo and the depth they drew; in the second, \
which nobody had asked him to keep, he wrote what the sailors told him about the weather further out. After nineteen years the second \
book was the thicker one. When the new breakwater was planned, the engineers from the city measured the tides for a month and drew a \
curve. He put his book beside it and said that the curve was right for eleven months of the year, and that February was missing.

To find files that have not been read for a year, use find with -atime: `find /srv -type f -atime +365 -print0 | xargs -0 du -ch`. Note \
that many systems mount their disks with noatime or relatime, so that the time of the last access is not what it says. A backup that \
was never restored is a hope and not a backup; restore one to a spare machine every quarter, and write down how long it took.

def moving_average(values, width):
    if width < 1:
        raise ValueError("width must be at least 1")
    total, out = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        if i >= width - 1:
            out.append(total / width)
    return out

Question: a train leaves at 8:40 and covers 126 km in an hour and three quarters. How fast is it on average? Answer: one hour and three \
quarters are 1.75 hours, and 126 / 1.75 = 72, so that it goes at 72 km/h on average, stops included. If it stops for three minutes at each \
of five stations, it moves for 1.5 hours, at 84 km/h.

Die Bibliothek schliesst um sechs, aber wer dann noch liest, darf bleiben, bis der Hausmeister mit den Fenstern fertig ist. La pluie avait \
commencé avant midi; à trois heures, la route du col était coupée et le car de Grenoble attendait devant la mairie. El mercado abre los \
martes y los viernes, y los domingos sólo en verano.

The committee agreed on three points. First, that measurements are published together with the conditions under which they were made. \
Second, that a difference smaller than the spread between repeated runs is not reported as a difference. Third, that whoever finds an \
error in an earlier report says so in the next one, on the first page. The treasurer asked whether this would cost anything. It would \
cost pride, said the chair, and the meeting went on to the question of the roof.
"""
