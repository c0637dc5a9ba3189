"""A few kilobytes of plain English, written for these tests, to score models on."""

TEXT = """\
The harbour town of Merrow lies where two rivers meet the sea. In spring the water is brown and fast, and the
fishermen keep their boats tied to the stone wall until the worst of it has gone by. Old people there say that the
rivers argue about who may enter the sea first, and that the sandbank in the middle is what they throw at each other.
The sandbank moves every year. A pilot who learned the channel as a boy has to learn it again, and the young pilots
who learn it from him learn at the same time that nothing they are told will stay true for long.

A school stands on the hill above the market. It was built as a store for grain, which is why its windows are small
and its walls are thick, and in summer it is the coolest place in town. The teacher, a patient woman who came from
the capital to stay one winter and never left, lets the children take measurements. They measure the rain in a glass
tube, the height of the tide on a painted post, and the length of the shadow of the church at noon. Every number goes
into a book with the date and a name. There are forty such books by now. When an engineer came to plan a new bridge,
he asked the council for records of the floods, and the council had none; the children brought him the books.

Bridges are simple to explain and hard to build. A load pushes down, and something must push back. In an arch the
stones lean on each other so that the weight runs along the curve into the ground on both sides; if the ground gives
way by the width of a hand, the arch may fall. A beam bends, and its lower side is pulled while its upper side is
pressed. Steel bears both, stone only the second, and wood the first as long as it is dry. The engineer drew all
three on the blackboard and asked the class which of them they would choose for a river that moves its own bed. A
girl in the last row said that she would choose a ferry.

He laughed, but he wrote it down. A ferry needs no foundation. It can be moved when the bank moves, and it costs
little until it has to carry more than a few carts an hour. The question, he told them, is never which answer is the
best one, but for how long, for how many and at what price. He made a table with three columns and filled it in from
what they called out: how many people cross on a market day, how many when it storms, what a wagon of salt is worth
on the other side, how often the ferry man is ill. When the table was full, nobody wanted the arch any more. Most
wanted the beam. The girl still wanted the ferry, and she had the numbers to show why, at least for the next ten
years.

In the evening he walked along the wall with the pilot. The tide was going out, and the sandbank showed its back like
a sleeping animal. The pilot pointed at a line of posts that leaned in all directions. Those, he said, were the piers
of the last bridge. It had stood for thirty years and had been right for every one of them until the last.
"""
