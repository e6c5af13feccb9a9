"""A restaurant: guests reserve tables, order dishes beforehand, and leave a deposit."""

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, spoken, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish

HELD_OUT = True
Allergen = Literal["none", "nuts", "fish", "milk"]
Area = Literal["hall", "terrace", "window"]
Course = Literal["starter", "main", "dessert"]
Hour = Literal["17:30", "18:00", "18:30", "19:00", "20:00", "20:30"]
Occasion = Literal["none", "birthday", "business", "anniversary"]


@dataclass(frozen=True)
class Guest:
    guest_id: str
    name: str
    phone: str
    allergy: Allergen
    regular: bool
    bonus: int


@dataclass(frozen=True)
class Dish:
    dish_id: str
    name: str
    course: Course
    price: int
    contains: Allergen
    portions_left: int
    minutes: int


@dataclass(frozen=True)
class Order:
    dish_id: str
    name: str
    portions: int
    amount: int


@dataclass(frozen=True)
class Reservation:
    reservation_id: str
    guest_id: str
    held: bool
    date: date
    hour: Hour
    seats: int
    area: Area
    occasion: Occasion
    deposit: int
    bonus_spent: int
    high_chairs: int
    orders: tuple[Order, ...]

    @property
    def bill(self) -> int:
        return sum(order.amount for order in self.orders) - self.bonus_spent

    def names(self) -> list[str]:
        words = [
            f"reservation {self.reservation_id}",
            f"your table on {spoken(self.date)}",
            f"the table for {self.seats} at {self.hour}",
        ]
        if self.occasion != "none":
            words.append(f"the {self.occasion} dinner in the {self.area} area")
        return words


@dataclass
class Restaurant(Toolkit):
    """You take the telephone of a restaurant where guests reserve tables and order ahead."""

    guests: dict[str, Guest]
    dishes: dict[str, Dish]
    reservations: dict[str, Reservation]

    def held(self, reservation_id: str) -> Reservation:
        table = self.reservations[reservation_id]
        self.require(table.held, "It is over.")
        return table

    @read
    def guest_by_phone(self, phone: str, name: str) -> Guest:
        """Finds a guest by telephone number and name."""
        problem = "No guest has this telephone number and name."
        return self.one(self.guests.values(), problem, phone=phone, name=name)

    @read
    def guest_card(self, guest_id: str) -> Guest:
        """Reads the card of a guest: allergy, regular, bonus."""
        return self.guests[guest_id]

    @read
    def book_of(self, guest_id: str) -> list[Reservation]:
        """Lists the reservations of a guest."""
        return [t for t in self.reservations.values() if t.guest_id == guest_id]

    @read
    def reservation(self, reservation_id: str) -> Reservation:
        """Reads a reservation with its dishes."""
        return self.reservations[reservation_id]

    @read
    def dish(self, name: str) -> Dish:
        """Reads a dish of the menu by its exact name."""
        return self.one(self.dishes.values(), "It is not on the menu.", name=name)

    @read
    def menu(self, course: Course, highest_price: int) -> list[Dish]:
        """Lists the dishes of a course up to a price."""
        dishes = self.dishes.values()
        return [d for d in dishes if d.course == course and d.price <= highest_price]

    @write
    def order_dish(self, reservation_id: str, dish_id: str, portions: int) -> int:
        """Orders portions of a dish for a table that is held; returns the bill."""
        table, dish = self.held(reservation_id), self.dishes[dish_id]
        self.require(portions > 0, "Order at least one.")
        self.require(dish.portions_left >= portions, f"Only {dish.portions_left} are left.")
        self.change(self.dishes, dish, portions_left=dish.portions_left - portions)
        order = Order(dish_id, dish.name, portions, dish.price * portions)
        table = self.change(self.reservations, table, orders=(*table.orders, order))
        return table.bill

    @write
    def drop_dish(self, reservation_id: str, dish_id: str) -> int:
        """Takes a dish off a reservation; returns the bill."""
        table = self.held(reservation_id)
        rest = tuple(order for order in table.orders if order.dish_id != dish_id)
        self.require(rest != table.orders, "It is not ordered.")
        table = self.change(self.reservations, table, orders=rest)
        return table.bill

    @write
    def set_area(self, reservation_id: str, area: Area) -> Area:
        """Seats a party elsewhere."""
        self.change(self.reservations, self.held(reservation_id), area=area)
        return area

    @write
    def set_seats(self, reservation_id: str, seats: int) -> int:
        """Sets the seats of a table."""
        self.require(seats > 0, "Set at least one seat.")
        self.change(self.reservations, self.held(reservation_id), seats=seats)
        return seats

    @write
    def add_high_chair(self, reservation_id: str) -> int:
        """Puts one more high chair to a table; returns how many there are."""
        table = self.held(reservation_id)
        table = self.change(self.reservations, table, high_chairs=table.high_chairs + 1)
        return table.high_chairs

    @write
    def spend_bonus(self, guest_id: str, reservation_id: str) -> int:
        """Takes a guest's whole bonus off the bill of a table; returns the bill."""
        guest, table = self.guests[guest_id], self.held(reservation_id)
        self.require(guest.bonus > 0, "There is no bonus.")
        self.change(self.guests, guest, bonus=0)
        spent = table.bonus_spent + guest.bonus
        table = self.change(self.reservations, table, bonus_spent=spent)
        return table.bill

    @write
    def give_up_table(self, reservation_id: str) -> int:
        """Gives a table up; returns the deposit that is paid back."""
        table = self.held(reservation_id)
        del self.reservations[reservation_id]
        return table.deposit

    @handover
    def transfer_to_human_agents(self, reason: Literal["wedding", "poisoning", "job"]) -> str:
        """Passes the telephone on to the owner."""
        return "The telephone is being passed on."


# Rules of the house, which no tool enforces.


@rule("Parties of 8 or more sit in the hall.")
def large_in_hall(seats: int, area: Area) -> bool:
    return seats < 8 or area == "hall"


@rule("A table is given up three days ahead at the latest.")
def ahead(kit: Restaurant, table: Reservation) -> bool:
    return table.date >= kit.today + timedelta(3)


@rule("The kitchen takes and changes orders for tables from the day after tomorrow on.")
def kitchen(kit: Restaurant, table: Reservation) -> bool:
    return table.date >= kit.today + timedelta(2)


@rule("A dish with what the guest's card names as an allergy is not ordered, whoever insists.")
def harmless(guest: Guest, dish: Dish) -> bool:
    return "none" in (guest.allergy, dish.contains) or dish.contains != guest.allergy


@rule("No more than 8 people sit at a table.")
def cap(seats: int) -> bool:
    return seats <= 8


@rule("The bonus is for regular guests.")
def regulars(guest: Guest) -> bool:
    return guest.regular


@rule("Two high chairs at a table are the most.")
def chairs(table: Reservation) -> bool:
    return table.high_chairs < 2


# What guests want.

booked = Mine(find="book_of", look="reservation")
held = booked.that(lambda table: table.held)
with_dishes = booked.that(lambda table: table.held and table.orders)
inside = booked.that(lambda table: table.held and table.area != "terrace")


@wish(held)
def order(scene: Scene, table: Reservation) -> Wish:
    dish, portions = scene.choose_unused(list(scene.kit.dishes.values())), scene.rng.randint(2, 5)
    return Wish(
        f"order {portions} portions of the {dish.name} for {scene.name(table)}",
        do=[("order_dish", table.reservation_id, dish.dish_id, portions)],
        reads=[("guest_card", scene.key), ("dish", dish.name)],
        rules=[harmless.of(scene.me, dish), kitchen.of(scene.kit, table)],
        facts=[
            scene.near(dish.price, "a portion costs less than ${}"),
            scene.near(dish.minutes, "the kitchen needs less than {} minutes for it"),
            (dish.portions_left >= portions, "that many portions are left"),
        ],
        ask="What is the bill for that table then?",
    )


@wish(with_dishes)
def drop(scene: Scene, table: Reservation) -> Wish:
    line = scene.choose(table.orders)
    return Wish(
        f"have the {line.name} taken off {scene.name(table)}",
        do=[("drop_dish", table.reservation_id, line.dish_id)],
        rules=[kitchen.of(scene.kit, table)],
        facts=[scene.near(line.amount, "it comes to less than ${} in all")],
        ask="What is the bill for that table without it?",
    )


@wish(held, every="give up all the tables that you have coming up")
def give_up(scene: Scene, table: Reservation) -> Wish:
    return Wish(
        f"give up {scene.name(table)}",
        do=[("give_up_table", table.reservation_id)],
        rules=[ahead.of(scene.kit, table)],
        facts=[
            scene.near(table.deposit, "the deposit is less than ${}"),
            (table.occasion == "none", "no occasion is noted for it"),
        ],
        ask="How much of a deposit comes back?",
        instead=[seats, terrace],
    )


@wish(inside, every="have all your tables that are inside moved to the terrace")
def terrace(scene: Scene, table: Reservation) -> Wish:
    return Wish(
        f"have {scene.name(table)} moved to the terrace",
        do=[("set_area", table.reservation_id, "terrace")],
        rules=[large_in_hall.of(table.seats, "terrace")],
        facts=[(table.area == "window", "it is at the window now")],
        instead=[give_up, chair],
    )


@wish(held)
def seats(scene: Scene, table: Reservation) -> Wish:
    wanted = table.seats + scene.rng.randint(1, 4)
    return Wish(
        f"have {wanted} seats at {scene.name(table)}",
        do=[("set_seats", table.reservation_id, wanted)],
        rules=[cap.of(wanted), large_in_hall.of(wanted, table.area)],
        facts=[
            (table.hour >= "19:00", "it begins at 19:00 or later"),
            (table.occasion != "birthday", "it is not noted as a birthday"),
        ],
        instead=[give_up],
    )


@wish(held)
def chair(scene: Scene, table: Reservation) -> Wish:
    return Wish(
        f"have one more high chair at {scene.name(table)}",
        do=[("add_high_chair", table.reservation_id)],
        rules=[chairs.of(table)],
        facts=[(table.high_chairs == 0, "there is none yet")],
        instead=[terrace],
    )


@wish(held)
def bonus(scene: Scene, table: Reservation) -> Wish:
    return Wish(
        f"spend your whole bonus on {scene.name(table)}",
        do=[("spend_bonus", scene.key, table.reservation_id)],
        reads=[("guest_card", scene.key)],
        rules=[regulars.of(scene.me)],
        facts=[scene.near(table.bill, "its bill is less than ${}")],
        ask="What is left to pay for that table?",
        instead=[give_up],
    )


@wish(booked)
def portions(scene: Scene, table: Reservation) -> Wish:
    ordered = sum(order.portions for order in table.orders)
    return Wish(f"know how many portions are ordered for {scene.name(table)} in all", told=ordered)


@wish()
def minutes(scene: Scene) -> Wish:
    dish = scene.choose_unused(list(scene.kit.dishes.values()))
    want = f"know how many minutes the kitchen needs for the {dish.name}"
    return Wish(want, reads=[("dish", dish.name)], told=dish.minutes)


owner = hand_over(
    "speak with the owner about",
    wedding="a wedding for eighty",
    poisoning="a food poisoning",
    job="a job as a waiter",
)


def identify(guest: Guest) -> tuple[str, tuple]:
    """Returns what a guest says of itself, and the call that finds it by that."""
    said = f"Your name is {guest.name} and your phone number is {guest.phone}."
    return said, ("guest_by_phone", guest.phone, guest.name)


# The records.

INGREDIENTS = "trout lamb duck aubergine beetroot cod peppers pears chickpeas".split()
WAYS = ("grilled", "braised", "smoked", "cold", "stuffed")


def draw(rng: Draw) -> Restaurant:
    """Draws the guests, the menu and the book."""
    kit = Restaurant(rng.today(), {}, {}, {})
    for name in rng.people(45):
        key = rng.number("G")
        kit.guests[key] = Guest(
            key,
            name,
            allergy=rng.choice(("none", "none", "nuts", "fish", "milk")),
            phone=rng.number("070", 7),
            regular=rng.random() < 0.5,
            bonus=rng.randrange(0, 90, 5),
        )
    for what in rng.of_split(INGREDIENTS):
        for how in WAYS:
            key = rng.number("D")
            kit.dishes[key] = Dish(
                key,
                f"{how} {what}",
                contains=rng.one_of(Allergen),
                course=rng.one_of(Course),
                price=rng.randint(6, 34),
                portions_left=rng.randrange(20),
                minutes=rng.randrange(5, 60, 5),
            )
    for guest_id, guest in kit.guests.items():
        harmful = {guest.allergy} - {"none"}
        dishes = [dish for dish in kit.dishes.values() if dish.contains not in harmful]
        for _ in range(rng.randint(4, 7)):
            key, is_held, seats = rng.number("RES-"), rng.random() < 0.75, rng.randint(2, 8)
            orders = []
            for dish in rng.sample(dishes, rng.randint(1, 3)):
                count = rng.randint(1, 4)
                orders.append(Order(dish.dish_id, dish.name, count, dish.price * count))
            kit.reservations[key] = Reservation(
                key,
                guest_id,
                is_held,
                date=rng.day(kit.today, 1, 16) if is_held else rng.day(kit.today, -60, -1),
                hour=rng.one_of(Hour),
                seats=seats,
                area=rng.one_of(Area) if seats < 8 else "hall",
                occasion=rng.one_of(Occasion),
                deposit=rng.randint(10, 80),
                bonus_spent=0,
                high_chairs=rng.randrange(3),
                orders=tuple(orders),
            )
    return kit
