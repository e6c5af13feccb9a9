"""A railway that runs night and day trains: bookings with legs, passengers and bicycles."""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal, get_args

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, spoken, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish

REFUND_FEE = 10
POINTS = 100  # of a leg, for first class
Fare = Literal["saver", "flexible"]
Hour = Literal["06:10", "08:25", "10:40", "13:05", "16:50", "19:15", "22:30"]
Meal = Literal["none", "vegetarian", "fish"]
TrainKind = Literal["regional", "express", "night"]


@dataclass(frozen=True)
class Traveller:
    traveller_id: str
    name: str
    birth_year: int
    railcard: bool
    points: int
    voucher: int


@dataclass(frozen=True)
class Train:
    train_id: str
    name: str
    kind: TrainKind
    departs: Hour
    minutes: int
    seats_left: int
    bicycle_spaces: int
    dining_car: bool


@dataclass(frozen=True)
class Leg:
    train_id: str
    train: str
    kind: TrainKind
    departs: Hour
    bicycles: int
    price: int
    minutes_late: int


@dataclass(frozen=True)
class Passenger:
    name: str
    meal: Meal


@dataclass(frozen=True)
class Booking:
    booking_id: str
    traveller_id: str
    status: Literal["confirmed", "travelled", "refunded"]
    fare: Fare
    date: date
    to: str
    cabin: Literal["first", "second"]
    legs: tuple[Leg, ...]
    passengers: tuple[Passenger, ...]
    compensated: bool

    @property
    def price(self) -> int:
        return sum(leg.price for leg in self.legs)

    def names(self) -> list[str]:
        return [
            f"booking {self.booking_id}",
            f"your trip to {self.to}",
            f"your trip on {spoken(self.date)}",
            f"your {self.fare} trip to {self.to}",
        ]


@dataclass
class Railway(Toolkit):
    """You serve the travellers of a railway."""

    travellers: dict[str, Traveller]
    trains: dict[str, Train]
    bookings: dict[str, Booking]

    def confirmed(self, booking_id: str) -> Booking:
        booking = self.bookings[booking_id]
        self.require(booking.status == "confirmed", f"The booking is {booking.status}.")
        return booking

    def leg(self, booking: Booking, train_id: str) -> Leg:
        return self.one(booking.legs, "The booking has no leg on this train.", train_id=train_id)

    def change_leg(self, booking: Booking, leg: Leg, **values) -> None:
        legs = self.change_part(booking.legs, leg, **values)
        self.change(self.bookings, booking, legs=legs)

    def change_passenger(self, booking: Booking, name: str, /, **values) -> None:
        who = self.one(booking.passengers, "The booking has no such passenger.", name=name)
        passengers = self.change_part(booking.passengers, who, **values)
        self.change(self.bookings, booking, passengers=passengers)

    @read
    def identify_traveller(self, name: str, birth_year: int) -> Traveller:
        """Finds a traveller by name and year of birth."""
        problem = "No traveller has this name and year of birth."
        return self.one(self.travellers.values(), problem, name=name, birth_year=birth_year)

    @read
    def traveller(self, traveller_id: str) -> Traveller:
        """Reads the record of a traveller: railcard, points, voucher."""
        return self.travellers[traveller_id]

    @read
    def bookings_of(self, traveller_id: str) -> list[Booking]:
        """Lists the bookings of a traveller."""
        return [b for b in self.bookings.values() if b.traveller_id == traveller_id]

    @read
    def booking(self, booking_id: str) -> Booking:
        """Reads a booking with its legs and passengers."""
        return self.bookings[booking_id]

    @read
    def train(self, name: str) -> Train:
        """Finds a train by its name: kind, departure, seats, bicycle spaces."""
        return self.one(self.trains.values(), "No train has this name.", name=name)

    @read
    def trains_of_kind(self, kind: TrainKind, most_minutes: int) -> list[Train]:
        """Lists the trains of a kind that take at most so many minutes."""
        trains = self.trains.values()
        return [each for each in trains if each.kind == kind and each.minutes <= most_minutes]

    @write
    def rebook_leg(self, booking_id: str, train_id: str, new_train_id: str) -> Hour:
        """Moves a leg of a confirmed booking, with its passengers and bicycles, to another train.

        Returns the departure of that train. The places in the old one stay taken.

        Args:
            train_id: the key of the leg's train, not its name
            new_train_id: the key of the other train, not its name
        """
        booking, new = self.confirmed(booking_id), self.trains[new_train_id]
        leg, seats = self.leg(booking, train_id), len(booking.passengers)
        is_new = all(each.train_id != new_train_id for each in booking.legs)
        self.require(is_new, f"{new.name} is in the booking already.")
        self.require(new.seats_left >= seats, f"{new.name} has {new.seats_left} free seats.")
        spaces = new.bicycle_spaces - leg.bicycles
        self.require(spaces >= 0, f"{new.name} has {new.bicycle_spaces} bicycle spaces.")
        self.change(self.trains, new, seats_left=new.seats_left - seats, bicycle_spaces=spaces)
        self.change_leg(
            booking,
            leg,
            train_id=new_train_id,
            train=new.name,
            kind=new.kind,
            departs=new.departs,
        )
        return new.departs

    @write
    def upgrade_booking(self, booking_id: str) -> int:
        """Moves a booking to first class for 100 points a leg; returns the points left."""
        booking = self.confirmed(booking_id)
        who, need = self.travellers[booking.traveller_id], POINTS * len(booking.legs)
        self.require(booking.cabin == "second", "It is in first class.")
        self.require(who.points >= need, f"Only {who.points} points are left.")
        self.change(self.bookings, booking, cabin="first")
        who = self.change(self.travellers, who, points=who.points - need)
        return who.points

    @write
    def add_bicycle(self, booking_id: str, train_id: str) -> int:
        """Adds a bicycle to a leg; returns how many there are.

        Args:
            train_id: the key of the leg's train, not its name
        """
        booking, train = self.confirmed(booking_id), self.trains[train_id]
        leg = self.leg(booking, train_id)
        self.require(train.bicycle_spaces > 0, f"{train.name} has no bicycle space.")
        self.change(self.trains, train, bicycle_spaces=train.bicycle_spaces - 1)
        bicycles = leg.bicycles + 1
        self.change_leg(booking, leg, bicycles=bicycles)
        return bicycles

    @write
    def refund_booking(self, booking_id: str) -> int:
        """Refunds a confirmed booking, less a fee of $10; returns the refund."""
        booking = self.confirmed(booking_id)
        self.change(self.bookings, booking, status="refunded")
        return booking.price - REFUND_FEE

    @write
    def pay_compensation(self, booking_id: str, train_id: str) -> int:
        """Adds half the price of a late leg to the traveller's voucher, once a booking.

        Returns the voucher.

        Args:
            train_id: the key of the leg's train, not its name
        """
        booking = self.bookings[booking_id]
        leg = self.leg(booking, train_id)
        self.require(booking.status == "travelled", "The trip is not over.")
        self.require(not booking.compensated, "It has been paid already.")
        who = self.travellers[booking.traveller_id]
        self.change(self.bookings, booking, compensated=True)
        who = self.change(self.travellers, who, voucher=who.voucher + leg.price // 2)
        return who.voucher

    @write
    def set_meal(self, booking_id: str, passenger: str, meal: Meal) -> Meal:
        """Sets the meal of a passenger of a confirmed booking."""
        self.change_passenger(self.confirmed(booking_id), passenger, meal=meal)
        return meal

    @write
    def rename_passenger(self, booking_id: str, passenger: str, new_name: str) -> str:
        """Puts another name in the place of a passenger's."""
        self.change_passenger(self.confirmed(booking_id), passenger, name=new_name)
        return new_name

    @handover
    def transfer_to_human_agents(self, reason: Literal["luggage", "group", "wheelchair"]) -> str:
        """Hands the traveller over to a colleague."""
        return "A colleague is taking over."


# Rules of the railway, which no tool enforces.


@rule("Saver fares are not refunded.")
def refundable(booking: Booking) -> bool:
    return booking.fare == "flexible"


@rule("On saver fares names are not changed.")
def renamable(booking: Booking) -> bool:
    return booking.fare == "flexible"


@rule(
    "Trips are refunded, moved to other trains and put in other names up to two days before they "
    "depart."
)
def two_days_ahead(kit: Railway, booking: Booking) -> bool:
    return booking.date >= kit.today + timedelta(2)


@rule("Compensation is due from 60 minutes of delay on.")
def an_hour_late(leg: Leg) -> bool:
    return leg.minutes_late >= 60


@rule("Bicycles travel in regional trains only, whatever space other trains show.")
def regional_if_bicycles(bicycles: int, kind: TrainKind) -> bool:
    return bicycles == 0 or kind == "regional"


@rule("With a saver fare a leg is moved only to a train of the same kind.")
def same_kind_if_saver(booking: Booking, leg: Leg, new: Train) -> bool:
    return booking.fare == "flexible" or new.kind == leg.kind


@rule("Upgrades with points are for holders of a railcard.")
def has_railcard(traveller: Traveller) -> bool:
    return traveller.railcard


# What travellers want.

bookings = Mine(find="bookings_of", look="booking")
coming = bookings.that(lambda booking: booking.status == "confirmed")
second = bookings.that(lambda booking: booking.status == "confirmed" and booking.cabin == "second")
over = bookings.that(lambda booking: booking.status == "travelled")
unpaid = bookings.that(lambda booking: booking.status == "travelled" and not booking.compensated)


@wish(coming, every="get refunds for all your trips that are still to come")
def refund(scene: Scene, booking: Booking) -> Wish:
    return Wish(
        f"get a refund for {scene.name(booking)}",
        do=[("refund_booking", booking.booking_id)],
        rules=[refundable.of(booking), two_days_ahead.of(scene.kit, booking)],
        facts=[
            (booking.cabin == "second", "it is booked in second class"),
            scene.near(booking.price, "its price is less than ${}"),
        ],
        ask="How much is the refund?",
        instead=[upgrade, rename],
    )


@wish(coming)
def rebook(scene: Scene, booking: Booking) -> Wish:
    leg = scene.choose(booking.legs)
    taken = {each.train_id for each in booking.legs}
    new = scene.choose_unused([t for t in scene.kit.trains.values() if t.train_id not in taken])
    has_seats = new.seats_left >= len(booking.passengers)
    return Wish(
        f"change from {leg.train} to {new.name} on {scene.name(booking)}",
        do=[("rebook_leg", booking.booking_id, leg.train_id, new.train_id)],
        reads=[("train", new.name)],
        rules=[
            two_days_ahead.of(scene.kit, booking),
            same_kind_if_saver.of(booking, leg, new),
            regional_if_bicycles.of(leg.bicycles, new.kind),
        ],
        facts=[
            (has_seats, "it has seats for all passengers"),
            (new.dining_car, "it has a dining car"),
            scene.near(new.minutes, "it takes less than {} minutes"),
        ],
        ask="When does the new train leave?",
        instead=[refund],
    )


@wish(second)
def upgrade(scene: Scene, booking: Booking) -> Wish:
    return Wish(
        f"use your points for first class on {scene.name(booking)}",
        do=[("upgrade_booking", booking.booking_id)],
        reads=[("traveller", scene.key)],
        rules=[has_railcard.of(scene.me)],
        facts=[scene.near(booking.price, "its price is less than ${}")],
        ask="How many points are left then?",
        instead=[refund],
    )


@wish(coming)
def bicycle(scene: Scene, booking: Booking) -> Wish:
    leg = scene.choose(booking.legs)
    scene.choose_unused([scene.kit.trains[leg.train_id]])  # its bicycle spaces are for one wish
    return Wish(
        f"take one more bicycle on {leg.train} on {scene.name(booking)}",
        do=[("add_bicycle", booking.booking_id, leg.train_id)],
        rules=[regional_if_bicycles.of(leg.bicycles + 1, leg.kind)],
        facts=[
            (leg.bicycles == 0, "none is booked on it yet"),
            (leg.departs < "12:00", "it leaves before noon"),
        ],
        ask="How many bicycles is that on this train?",
    )


@wish(unpaid)
def compensation(scene: Scene, booking: Booking) -> Wish:
    leg = scene.choose(booking.legs)
    return Wish(
        f"get compensation for the delay of {leg.train} on {scene.name(booking)}",
        do=[("pay_compensation", booking.booking_id, leg.train_id)],
        rules=[an_hour_late.of(leg)],
        facts=[
            scene.near(leg.price, "this leg cost less than ${}"),
            (booking.cabin == "first", "it was in first class"),
        ],
        ask="What is your voucher worth then?",
    )


@wish(coming)
def meal(scene: Scene, booking: Booking) -> Wish:
    who = scene.choose(booking.passengers)
    wanted = scene.choose([m for m in get_args(Meal) if m != who.meal])
    return Wish(
        f'have the meal of {who.name} on {scene.name(booking)} set to "{wanted}"',
        do=[("set_meal", booking.booking_id, who.name, wanted)],
        facts=[(any(leg.kind == "night" for leg in booking.legs), "it has a night train")],
        instead=[refund],
    )


@wish(coming)
def rename(scene: Scene, booking: Booking) -> Wish:
    who = scene.choose(booking.passengers)
    taken = [each.name for each in booking.passengers]
    names = [person.name.split()[0] for person in scene.kit.travellers.values()]
    new = scene.choose([name for name in names if name not in taken])
    return Wish(
        f"have {new} travel on {scene.name(booking)} in place of {who.name}",
        do=[("rename_passenger", booking.booking_id, who.name, new)],
        rules=[renamable.of(booking), two_days_ahead.of(scene.kit, booking)],
        facts=[(who.meal == "none", f"no meal is booked for {who.name}")],
        instead=[refund],
    )


@wish(over)
def delay(scene: Scene, booking: Booking) -> Wish:
    late = sum(leg.minutes_late for leg in booking.legs)
    want = f"know how many minutes the trains of {scene.name(booking)} were late together"
    return Wish(want, told=late)


@wish()
def departure(scene: Scene) -> Wish:
    train = scene.choose_unused(list(scene.kit.trains.values()))
    reads = [("train", train.name)]
    return Wish(f"know how many minutes {train.name} takes", reads=reads, told=train.minutes)


colleague = hand_over(
    "speak to a colleague about",
    luggage="lost luggage, a blue backpack",
    group="a trip of a large group",
    wheelchair="help with a wheelchair",
)


def identify(traveller: Traveller) -> tuple[str, tuple]:
    """Returns what a traveller says of itself, and the call that finds it by that."""
    said = f"Your name is {traveller.name} and you were born in {traveller.birth_year}."
    return said, ("identify_traveller", traveller.name, traveller.birth_year)


# The records.

CITIES = (
    "Bergen Lyon Porto Graz Ghent Turin Malmo Brno Cork Basel Riga Vigo Oslo Lille Zagreb Trieste "
    "Aarhus Leipzig Bari Nantes Gdansk"
).split()
COMPANIONS = "Mateo Lena Noah Ida Theo Nora Luca Mila Elias Alma Oskar Vera Milo Zoe Anton".split()
PREFIXES = {"regional": "RE", "express": "IC", "night": "NJ"}


def draw(rng: Draw) -> Railway:
    """Draws the travellers, the trains and the bookings."""
    kit = Railway(rng.today(), {}, {}, {})
    for _ in range(60):
        key, kind = rng.number("N"), rng.one_of(TrainKind)
        kit.trains[key] = Train(
            key,
            name=rng.number(f"{PREFIXES[kind]} ", 3),
            kind=kind,
            minutes=rng.randrange(30, 600, 5),
            departs=rng.one_of(Hour),
            seats_left=rng.choice((0, 2, 5, 9)),
            bicycle_spaces=rng.randint(0, 3),
            dining_car=rng.random() < 0.5,
        )
    for name in rng.people(45):
        key = rng.number("RT", 6)
        kit.travellers[key] = Traveller(
            key,
            name,
            birth_year=rng.randint(1948, 2004),
            railcard=rng.random() < 0.5,
            points=rng.randrange(0, 600, 10),
            voucher=rng.randint(5, 80),
        )
        for to in rng.sample(rng.of_split(CITIES), rng.randint(5, 7)):
            booking = _booking(rng, kit, key, to)
            kit.bookings[booking.booking_id] = booking
    return kit


def _booking(rng, kit, traveller_id, to) -> Booking:
    key = rng.number("B", 6)
    status = rng.choice(("confirmed", "confirmed", "confirmed", "travelled", "travelled"))
    day = rng.day(kit.today, 0, 25) if status == "confirmed" else rng.day(kit.today, -40, -1)
    legs = []
    for train in rng.sample(list(kit.trains.values()), rng.randint(1, 2)):
        price, late, bicycles = rng.randint(12, 90), rng.randrange(5, 125, 5), rng.randint(0, 1)
        leg = Leg(
            train_id=train.train_id,
            train=train.name,
            kind=train.kind,
            departs=train.departs,
            bicycles=bicycles if train.kind == "regional" else 0,
            price=price,
            minutes_late=late if status == "travelled" else 0,
        )
        legs.append(leg)
    passengers = []
    for name in rng.sample(rng.of_split(COMPANIONS), rng.randint(1, 3)):
        passengers.append(Passenger(name, rng.one_of(Meal)))
    return Booking(
        key,
        traveller_id,
        status,
        date=day,
        to=to,
        fare=rng.one_of(Fare),
        cabin=rng.choice(("first", "second", "second")),
        legs=tuple(legs),
        passengers=tuple(passengers),
        compensated=any(map(an_hour_late.kept, legs)) and rng.random() < 0.3,
    )
