"""A retail bank: accounts with fees, cards, and payments that may be disputed."""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal, get_args

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, spoken, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish

Account = Literal["checking", "savings", "deposit"]
CardKind = Literal["debit", "credit", "virtual"]
FeeKind = Literal["account fee", "late fee", "paper fee"]
Reason = Literal["not_received", "charged_twice", "not_mine"]
Switch = Literal["on", "off"]


@dataclass(frozen=True)
class Client:
    client_id: str
    name: str
    birth_date: date
    private: bool
    fees_waived_this_year: int


@dataclass(frozen=True)
class Fee:
    what: FeeKind
    amount: int
    waived: bool


@dataclass(frozen=True)
class BankAccount:
    account_id: str
    client_id: str
    kind: Account
    balance: int
    interest_percent: int
    fees: tuple[Fee, ...]

    def names(self) -> list[str]:
        return [f"account {self.account_id}", f"your {self.kind} account"]


@dataclass(frozen=True)
class Card:
    card_id: str
    client_id: str
    kind: CardKind
    ends_in: str
    active: bool
    frozen_by: Literal["nobody", "client", "bank"]
    limit: int
    abroad: Switch

    def names(self) -> list[str]:
        return [
            f"card {self.card_id}",
            f"your {self.kind} card",
            f"your card that ends in {self.ends_in}",
            f"your {'active' if self.active else 'frozen'} {self.kind} card",
        ]


@dataclass(frozen=True)
class Payment:
    payment_id: str
    client_id: str
    merchant: str
    on: date
    amount: int
    status: Literal["booked", "pending", "disputed"]
    abroad: bool
    place: str
    reason: Reason | None

    def names(self) -> list[str]:
        return [
            f"payment {self.payment_id}",
            f"your payment at {self.merchant}",
            f"the payment of {spoken(self.on)} at {self.merchant}",
        ]


@dataclass
class Bank(Toolkit):
    """You serve the clients of a retail bank."""

    clients: dict[str, Client]
    accounts: dict[str, BankAccount]
    cards: dict[str, Card]
    payments: dict[str, Payment]

    def active(self, card_id: str) -> Card:
        card = self.cards[card_id]
        self.require(card.active, "The card is frozen.")
        return card

    @read
    def client_by_birth(self, name: str, birth_date: date) -> Client:
        """Finds a client by name and date of birth."""
        problem = "Name and date of birth do not match."
        return self.one(self.clients.values(), problem, name=name, birth_date=birth_date)

    @read
    def client_profile(self, client_id: str) -> Client:
        """Reads the profile of a client: private or not, fees waived this year."""
        return self.clients[client_id]

    @read
    def client_accounts(self, client_id: str) -> list[BankAccount]:
        """Lists the accounts of a client, with their fees."""
        return [a for a in self.accounts.values() if a.client_id == client_id]

    @read
    def account(self, account_id: str) -> BankAccount:
        """Reads an account with its fees."""
        return self.accounts[account_id]

    @read
    def client_cards(self, client_id: str) -> list[Card]:
        """Lists the cards of a client."""
        return [card for card in self.cards.values() if card.client_id == client_id]

    @read
    def card(self, card_id: str) -> Card:
        """Reads a card."""
        return self.cards[card_id]

    @read
    def client_payments(self, client_id: str) -> list[Payment]:
        """Lists the card payments of a client."""
        return [p for p in self.payments.values() if p.client_id == client_id]

    @read
    def payment(self, payment_id: str) -> Payment:
        """Reads a payment."""
        return self.payments[payment_id]

    @write
    def transfer(self, from_account: str, to_account: str, amount: int) -> int:
        """Moves money between accounts of a client; returns what is left on the first."""
        source, target = self.accounts[from_account], self.accounts[to_account]
        self.require(source.client_id == target.client_id, "These are two clients' accounts.")
        self.require(source != target, "This is one account.")
        self.require(0 < amount <= source.balance, f"Only {source.balance} is there.")
        self.change(self.accounts, target, balance=target.balance + amount)
        source = self.change(self.accounts, source, balance=source.balance - amount)
        return source.balance

    @write
    def waive_fee(self, account_id: str, what: FeeKind) -> int:
        """Gives a fee of an account back; returns its amount."""
        account = self.accounts[account_id]
        fee = self.one(account.fees, "There is no such fee.", what=what)
        self.require(not fee.waived, "It was given back.")
        fees = self.change_part(account.fees, fee, waived=True)
        self.change(self.accounts, account, fees=fees, balance=account.balance + fee.amount)
        client = self.clients[account.client_id]
        self.change(self.clients, client, fees_waived_this_year=client.fees_waived_this_year + 1)
        return fee.amount

    @write
    def dispute_payment(self, payment_id: str, reason: Reason) -> int:
        """Opens a dispute about a payment that is booked; returns its amount."""
        payment = self.payments[payment_id]
        self.require(payment.status == "booked", f"It is {payment.status}.")
        self.change(self.payments, payment, status="disputed", reason=reason)
        return payment.amount

    @write
    def freeze_card(self, card_id: str) -> str:
        """Freezes an active card."""
        self.change(self.cards, self.active(card_id), active=False, frozen_by="client")
        return "frozen"

    @write
    def unfreeze_card(self, card_id: str) -> str:
        """Makes a frozen card work again."""
        card = self.cards[card_id]
        self.require(not card.active, "It is active.")
        self.change(self.cards, card, active=True, frozen_by="nobody")
        return "active"

    @write
    def set_card_limit(self, card_id: str, limit: int) -> int:
        """Sets the monthly limit of a card, $100 at least."""
        self.require(limit >= 100, "The limit is $100 at least.")
        self.change(self.cards, self.cards[card_id], limit=limit)
        return limit

    @write
    def set_abroad(self, card_id: str, abroad: Switch) -> Switch:
        """Turns payments abroad of an active card on or off."""
        card = self.active(card_id)
        self.require(card.abroad != abroad, f"It is {abroad}.")
        self.change(self.cards, card, abroad=abroad)
        return abroad

    @handover
    def transfer_to_human_agents(self, reason: Literal["mortgage", "inheritance", "fraud"]) -> str:
        """Connects the client with an adviser."""
        return "An adviser will take over."


# Rules of the bank, which no tool enforces.


@rule("Payments are disputed up to 45 days after they were made.")
def in_time(kit: Bank, payment: Payment) -> bool:
    return payment.on >= kit.today - timedelta(45)


@rule("Payments below $15 are not disputed.")
def large_enough(payment: Payment) -> bool:
    return payment.amount >= 15


@rule("One fee a year is given back to a client.")
def first_this_year(client: Client) -> bool:
    return client.fees_waived_this_year == 0


@rule("Late fees are never given back.")
def not_late(fee: Fee) -> bool:
    return fee.what != "late fee"


@rule("No more than $800 is moved by one transfer, except for private clients.")
def within_limit(client: Client, amount: int) -> bool:
    return amount <= 800 or client.private


@rule("Nothing is taken out of a deposit account.")
def no_deposit(account: BankAccount) -> bool:
    return account.kind != "deposit"


@rule("A card that the bank has frozen stays frozen.")
def own_frost(card: Card) -> bool:
    return card.frozen_by != "bank"


@rule("The limit of a card is at most doubled.")
def at_most_doubled(card: Card, limit: int) -> bool:
    return limit <= 2 * card.limit


# What clients want.

accounts = Mine(find="client_accounts", look="account")
charged = accounts.that(lambda account: any(not fee.waived for fee in account.fees))
cards = Mine(find="client_cards", look="card")
active = cards.that(lambda card: card.active)
frozen = cards.that(lambda card: not card.active)
payments = Mine(find="client_payments", look="payment")
booked = payments.that(lambda payment: payment.status == "booked")


@wish(accounts)
def move(scene: Scene, account: BankAccount) -> Wish:
    others = [a for a in accounts.all(scene.kit, scene.key) if a.kind != account.kind]
    target, amount = scene.choose_unused(others), 50 * scene.rng.randint(1, 30)
    to = target.names()[0 if scene.keys else 1]
    return Wish(
        f"move ${amount} from {scene.name(account)} to {to}",
        do=[("transfer", account.account_id, target.account_id, amount)],
        reads=[("client_profile", scene.key)],
        rules=[within_limit.of(scene.me, amount), no_deposit.of(account)],
        facts=[
            scene.near(account.balance, "less than ${} is there now"),
            (account.interest_percent == 0, "there is no interest on it"),
        ],
        ask="How much is left on it then?",
        instead=[waive],
    )


@wish(charged)
def waive(scene: Scene, account: BankAccount) -> Wish:
    fee = scene.choose([fee for fee in account.fees if not fee.waived])
    return Wish(
        f"get the {fee.what} on {scene.name(account)} back",
        do=[("waive_fee", account.account_id, fee.what)],
        reads=[("client_profile", scene.key)],
        rules=[first_this_year.of(scene.me), not_late.of(fee)],
        facts=[
            scene.near(fee.amount, "it was less than ${}"),
            (account.interest_percent > 0, "there is interest on that account"),
        ],
        ask="How much comes back?",
        instead=[move],
    )


@wish(booked)
def dispute(scene: Scene, payment: Payment) -> Wish:
    because = {
        "not_received": "the goods were not received",
        "charged_twice": "you were charged twice",
        "not_mine": "it is not yours",
    }
    reason = scene.rng.choice(list(because))
    return Wish(
        f'dispute {scene.name(payment)} as "{reason}", because {because[reason]}',
        do=[("dispute_payment", payment.payment_id, reason)],
        rules=[in_time.of(scene.kit, payment), large_enough.of(payment)],
        facts=[
            (payment.abroad, "it was made abroad"),
            scene.near(payment.amount, "it was less than ${}"),
        ],
        ask="How much is it about?",
    )


@wish(active, every="have all your active cards frozen")
def freeze(scene: Scene, card: Card) -> Wish:
    return Wish(
        f"have {scene.name(card)} frozen",
        do=[("freeze_card", card.card_id)],
        facts=[
            (card.abroad == "on", "payments abroad are on"),
            scene.near(card.limit, "its limit is below ${}"),
        ],
        instead=[limit, abroad],
    )


@wish(frozen, every="have all your frozen cards work again")
def unfreeze(scene: Scene, card: Card) -> Wish:
    return Wish(
        f"have {scene.name(card)} work again",
        do=[("unfreeze_card", card.card_id)],
        rules=[own_frost.of(card)],
        facts=[scene.near(card.limit, "its limit is below ${}")],
        instead=[limit],
    )


@wish(cards)
def limit(scene: Scene, card: Card) -> Wish:
    wanted = 100 * round(card.limit * scene.rng.uniform(1.3, 3) / 100)
    return Wish(
        f"have the limit of {scene.name(card)} set to ${wanted}",
        do=[("set_card_limit", card.card_id, wanted)],
        rules=[at_most_doubled.of(card, wanted)],
        facts=[
            (card.active, "the card is active"),
            scene.near(card.limit, "it is below ${} now"),
        ],
        instead=[freeze, unfreeze],
    )


@wish(active)
def abroad(scene: Scene, card: Card) -> Wish:
    switch = "off" if card.abroad == "on" else "on"
    return Wish(
        f"have payments abroad turned {switch} for {scene.name(card)}",
        do=[("set_abroad", card.card_id, switch)],
        facts=[scene.near(card.limit, "its limit is below ${}")],
        instead=[freeze],
    )


@wish(accounts)
def fees(scene: Scene, account: BankAccount) -> Wish:
    told = sum(fee.amount for fee in account.fees)
    return Wish(f"know what the fees on {scene.name(account)} come to", told=told)


@wish(payments)
def place(scene: Scene, payment: Payment) -> Wish:
    return Wish(f"know in which city {scene.name(payment)} was made", told=payment.place)


adviser = hand_over(
    "speak with an adviser about",
    mortgage="a mortgage for a house",
    inheritance="an inheritance",
    fraud="a fraud by telephone",
)


def identify(client: Client) -> tuple[str, tuple]:
    """Returns what a client says of itself, and the call that finds it by that."""
    said = f"Your name is {client.name} and your date of birth is {client.birth_date}."
    return said, ("client_by_birth", client.name, client.birth_date)


# The records.

MERCHANTS = (
    "Corner Bakery, Hanson Shoes, City Cinema, Blue Taxi, Garden World, Northern Rail, "
    "Parkside Hotel, Pizza Roma, Green Grocer, Speedy Fuel, Harbour Travel, Smile Dental, "
    "Pet Palace, Lucky Noodles, Electro Point, Toy Corner, Sunny Spa, Mobile World"
).split(", ")
CITIES = "Bergen Lyon Porto Graz Ghent Turin Malmo Brno Cork Basel Riga Vigo".split()


def draw(rng: Draw) -> Bank:
    """Draws the clients with their accounts, cards and payments."""
    kit = Bank(rng.today(), {}, {}, {}, {})
    for name in rng.people(45):
        key = rng.number("", 8)
        kit.clients[key] = Client(
            key,
            name,
            birth_date=rng.day(kit.today, -24000, -7500),
            fees_waived_this_year=rng.choice((0, 0, 1)),
            private=rng.random() < 0.3,
        )
        for kind in rng.sample(get_args(Account), rng.randint(2, 3)):
            account = _account(rng, key, kind)
            kit.accounts[account.account_id] = account
        for _ in range(rng.randint(2, 4)):
            card = _card(rng, key)
            kit.cards[card.card_id] = card
        for merchant in rng.sample(rng.of_split(MERCHANTS), 5):
            payment = _payment(rng, kit.today, key, merchant)
            kit.payments[payment.payment_id] = payment
    return kit


def _account(rng, client_id, kind) -> BankAccount:
    key = rng.number("DE", 7)
    fees = []
    for what in rng.sample(get_args(FeeKind), rng.randint(1, 3)):
        is_waived = what != "late fee" and rng.random() < 0.2
        fees.append(Fee(what, rng.randint(3, 30), is_waived))
    return BankAccount(
        key,
        client_id,
        kind,
        balance=rng.randint(40, 6000),
        interest_percent=rng.randint(0, 3),
        fees=tuple(fees),
    )


def _card(rng, client_id) -> Card:
    key, kind, is_active = rng.number("CD", 6), rng.one_of(CardKind), rng.random() < 0.65
    return Card(
        key,
        client_id,
        kind,
        active=is_active,
        frozen_by="nobody" if is_active else rng.choice(("client", "bank")),
        limit=rng.randrange(200, 3000, 100),
        abroad=rng.one_of(Switch),
        ends_in=rng.number("", 4),
    )


def _payment(rng, today, client_id, merchant) -> Payment:
    status = rng.choice(("booked", "booked", "booked", "pending", "disputed"))
    is_disputed = status == "disputed"
    return Payment(
        rng.number("TX", 7),
        client_id,
        merchant,
        on=rng.day(today, -90, -1),
        amount=rng.randint(15 if is_disputed else 4, 120),
        status=status,
        abroad=rng.random() < 0.4,
        place=rng.name(CITIES),
        reason=rng.one_of(Reason) if is_disputed else None,
    )
