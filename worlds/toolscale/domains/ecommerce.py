"""An online shop: orders of several lines, returns, exchanges, payment methods."""

from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Literal, get_args

from worlds.toolscale.toolkit import Draw, Toolkit, handover, read, spoken, write
from worlds.toolscale.wishes import Mine, Scene, Wish, hand_over, rule, wish

SHIPPING_FEE = 7
Category = Literal["electronics", "clothing", "kitchen", "furniture"]
Colour = Literal["black", "white", "green", "red"]
Method = Literal["standard", "express"]
Payment = Literal["credit card", "gift card", "bank account"]


@dataclass(frozen=True)
class PaymentMethod:
    method_id: str
    kind: Payment


@dataclass(frozen=True)
class Customer:
    customer_id: str
    name: str
    zip: str
    email: str
    plus: bool
    payment_methods: tuple[PaymentMethod, ...]


@dataclass(frozen=True)
class Product:
    product_id: str
    name: str
    category: Category
    colour: Colour
    price: int
    stock: int
    warranty_years: int
    final_sale: bool


@dataclass(frozen=True)
class Line:
    product_id: str
    name: str
    colour: Colour
    price: int
    quantity: int
    state: Literal["ordered", "returned", "exchanged"]
    settled: str  # the payment method refunded to, or the product exchanged for

    @property
    def amount(self) -> int:
        return self.price * self.quantity

    @property
    def words(self) -> str:
        return f"the {self.colour} {self.name}"


@dataclass(frozen=True)
class PurchaseOrder:
    order_id: str
    customer_id: str
    status: Literal["pending", "delivered", "cancelled"]
    placed_on: date
    delivered_on: date | None
    lines: tuple[Line, ...]
    shipping: Method
    city: str
    paid_with: str
    shipping_refunded: bool

    @property
    def total(self) -> int:
        return sum(line.amount for line in self.lines)

    def names(self) -> list[str]:
        words = [f"order {self.order_id}", f"the order that you placed on {spoken(self.placed_on)}"]
        words += [f"the order with {line.words}" for line in self.lines]
        words.append(f"your {self.status} order to {self.city}")
        if self.delivered_on:
            words.append(f"the order that arrived on {spoken(self.delivered_on)}")
        return words


@dataclass
class Shop(Toolkit):
    """You serve the customers of an online shop."""

    customers: dict[str, Customer]
    products: dict[str, Product]
    orders: dict[str, PurchaseOrder]

    def of_status(self, order_id: str, status: str) -> PurchaseOrder:
        order = self.orders[order_id]
        self.require(order.status == status, f"The order is {order.status}.")
        return order

    def line(self, order: PurchaseOrder, product_id: str) -> Line:
        problem = "The order has no such product."
        line = self.one(order.lines, problem, product_id=product_id)
        self.require(line.state == "ordered", f"It is {line.state}.")
        return line

    def change_line(self, order: PurchaseOrder, line: Line, **values) -> PurchaseOrder:
        lines = self.change_part(order.lines, line, **values)
        return self.change(self.orders, order, lines=lines)

    @read
    def find_customer(self, name: str, zip: str) -> Customer:
        """Finds a customer by name and zip code."""
        return self.one(self.customers.values(), "There is no such customer.", name=name, zip=zip)

    @read
    def customer(self, customer_id: str) -> Customer:
        """Reads a customer's record: plus membership, payment methods."""
        return self.customers[customer_id]

    @read
    def orders_of(self, customer_id: str) -> list[PurchaseOrder]:
        """Lists the orders of a customer, with their lines."""
        return [order for order in self.orders.values() if order.customer_id == customer_id]

    @read
    def order(self, order_id: str) -> PurchaseOrder:
        """Reads an order with its lines."""
        return self.orders[order_id]

    @read
    def variants(self, name: str) -> list[Product]:
        """Lists the colours of a product, such as all tablets: price, stock, warranty, sale."""
        return [product for product in self.products.values() if product.name == name]

    @read
    def search_products(self, category: Category, highest_price: int) -> list[Product]:
        """Lists the products of a category up to a price."""
        products = self.products.values()
        return [p for p in products if p.category == category and p.price <= highest_price]

    @write
    def cancel_order(self, order_id: str) -> int:
        """Cancels a pending order; returns the refund."""
        order = self.of_status(order_id, "pending")
        self.change(self.orders, order, status="cancelled")
        return order.total

    @write
    def change_shipping(self, order_id: str, method: Method) -> Method:
        """Sets how a pending order is sent."""
        order = self.of_status(order_id, "pending")
        self.require(order.shipping != method, f"It is sent by {method}.")
        self.change(self.orders, order, shipping=method)
        return method

    @write
    def change_city(self, order_id: str, city: str) -> str:
        """Sends a pending order to another city."""
        self.change(self.orders, self.of_status(order_id, "pending"), city=city)
        return city

    @write
    def remove_line(self, order_id: str, product_id: str) -> int:
        """Takes a product, but not the last one, out of a pending order; returns the total."""
        order = self.of_status(order_id, "pending")
        line = self.line(order, product_id)
        self.require(len(order.lines) > 1, "Nothing would be left; cancel the order.")
        lines = tuple(each for each in order.lines if each is not line)
        order = self.change(self.orders, order, lines=lines)
        return order.total

    @write
    def set_quantity(self, order_id: str, product_id: str, quantity: int) -> int:
        """Sets how many pieces of a product a pending order has; returns the total."""
        order = self.of_status(order_id, "pending")
        self.require(quantity > 0, "There must be at least one piece.")
        order = self.change_line(order, self.line(order, product_id), quantity=quantity)
        return order.total

    @write
    def return_product(self, order_id: str, product_id: str, method_id: str) -> int:
        """Takes a delivered product back for a payment method; returns the refund."""
        order = self.of_status(order_id, "delivered")
        line = self.line(order, product_id)
        methods = self.customers[order.customer_id].payment_methods
        self.one(methods, "The customer has no such payment method.", method_id=method_id)
        self.change_line(order, line, state="returned", settled=method_id)
        return line.amount

    @write
    def exchange_product(self, order_id: str, product_id: str, new_product_id: str) -> int:
        """Exchanges a delivered product, all its pieces; returns what a new one costs."""
        order, new = self.of_status(order_id, "delivered"), self.products[new_product_id]
        line = self.line(order, product_id)
        self.require(new.stock >= line.quantity, f"Only {new.stock} are in stock.")
        self.change(self.products, new, stock=new.stock - line.quantity)
        self.change_line(order, line, state="exchanged", settled=new_product_id)
        return new.price

    @write
    def refund_shipping(self, order_id: str) -> int:
        """Pays the shipping fee of a delivered order back; returns the fee."""
        order = self.of_status(order_id, "delivered")
        self.require(not order.shipping_refunded, "It has been paid back.")
        self.change(self.orders, order, shipping_refunded=True)
        return SHIPPING_FEE

    @write
    def set_email(self, customer_id: str, email: str) -> str:
        """Sets the email address of a customer."""
        self.change(self.customers, self.customers[customer_id], email=email)
        return email

    @handover
    def transfer_to_human_agents(self, reason: Literal["damage", "bulk", "complaint"]) -> str:
        """Hands the customer over to a human agent."""
        return "The customer is being transferred."


# Rules of the shop, which no tool enforces.


@rule("An order is cancelled up to two days after it was placed.")
def unpacked(kit: Shop, order: PurchaseOrder) -> bool:
    return order.placed_on >= kit.today - timedelta(2)


@rule("A product is returned or exchanged within 21 days of its delivery.")
def delivered_lately(kit: Shop, order: PurchaseOrder) -> bool:
    return order.delivered_on is not None and order.delivered_on >= kit.today - timedelta(21)


@rule("Products of the final sale are neither taken back nor exchanged.")
def no_sale(kit: Shop, line: Line) -> bool:
    return not kit.products[line.product_id].final_sale


@rule("A refund goes to the payment method that the order was paid with and to no other.")
def same_method(order: PurchaseOrder, method: PaymentMethod) -> bool:
    return method.method_id == order.paid_with


@rule("A customer gets at most 4 pieces of a product in an order, except for members with plus.")
def few_pieces(customer: Customer, quantity: int) -> bool:
    return quantity <= 4 or customer.plus


@rule("Express shipping is for members with plus.")
def members(customer: Customer) -> bool:
    return customer.plus


@rule("The shipping fee is paid back only if the delivery took more than 6 days.")
def delivered_late(order: PurchaseOrder) -> bool:
    return order.delivered_on is not None and order.delivered_on > order.placed_on + timedelta(6)


# What customers want.

orders = Mine(find="orders_of", look="order")
pending = orders.that(lambda order: order.status == "pending")
long = orders.that(lambda order: order.status == "pending" and len(order.lines) > 1)
standard = orders.that(lambda order: order.status == "pending" and order.shipping == "standard")
delivered = orders.that(lambda order: order.status == "delivered")


@wish(pending, every="cancel all your pending orders")
def cancel(scene: Scene, order: PurchaseOrder) -> Wish:
    return Wish(
        f"cancel {scene.name(order)}",
        do=[("cancel_order", order.order_id)],
        rules=[unpacked.of(scene.kit, order)],
        facts=[
            scene.near(order.total, "it comes to less than ${}"),
            (order.shipping == "standard", "it is sent by standard shipping"),
        ],
        ask="How much comes back?",
        instead=[city, drop, express],
    )


@wish(standard, every="have all your pending orders that go by standard shipping sent by express")
def express(scene: Scene, order: PurchaseOrder) -> Wish:
    return Wish(
        f"have {scene.name(order)} sent by express",
        do=[("change_shipping", order.order_id, "express")],
        reads=[("customer", scene.key)],
        rules=[members.of(scene.me)],
        facts=[scene.near(order.total, "it comes to less than ${}")],
        instead=[cancel, city],
    )


@wish(pending)
def city(scene: Scene, order: PurchaseOrder) -> Wish:
    cities = [each.city for each in scene.kit.orders.values() if each.city != order.city]
    wanted = scene.choose(sorted(set(cities)))
    return Wish(
        f"have {scene.name(order)} sent to {wanted}",
        do=[("change_city", order.order_id, wanted)],
        facts=[(order.shipping == "standard", "it is sent by standard shipping")],
        instead=[cancel],
    )


@wish(long)
def drop(scene: Scene, order: PurchaseOrder) -> Wish:
    line = scene.choose(order.lines)
    return Wish(
        f"have {line.words} taken out of {scene.name(order)}",
        do=[("remove_line", order.order_id, line.product_id)],
        facts=[scene.near(line.amount, "it comes to less than ${} there")],
        ask="What is the total then?",
        instead=[cancel],
    )


@wish(pending)
def quantity(scene: Scene, order: PurchaseOrder) -> Wish:
    line, wanted = scene.choose(order.lines), scene.rng.randint(3, 7)
    return Wish(
        f"have {wanted} pieces of {line.words} in {scene.name(order)}",
        do=[("set_quantity", order.order_id, line.product_id, wanted)],
        reads=[("customer", scene.key)],
        rules=[few_pieces.of(scene.me, wanted)],
        facts=[scene.near(line.price, "one piece costs less than ${}")],
        ask="What is the total then?",
        instead=[cancel],
    )


@wish(delivered)
def give_back(scene: Scene, order: PurchaseOrder) -> Wish:
    line, method = scene.choose(order.lines), scene.choose(scene.me.payment_methods)
    return Wish(
        f"return {line.words} from {scene.name(order)}, with the refund to your {method.kind}",
        do=[("return_product", order.order_id, line.product_id, method.method_id)],
        reads=[("customer", scene.key), ("variants", line.name)],
        rules=[
            delivered_lately.of(scene.kit, order),
            no_sale.of(scene.kit, line),
            same_method.of(order, method),
        ],
        facts=[scene.near(line.amount, "it came to less than ${}")],
        ask="How much is the refund?",
        instead=[colour],
    )


@wish(delivered)
def colour(scene: Scene, order: PurchaseOrder) -> Wish:
    line = scene.choose(order.lines)
    others = [p for p in scene.kit.variants(line.name) if p.colour != line.colour]
    new = scene.choose_unused(others)
    has_enough = new.stock >= line.quantity
    return Wish(
        f"exchange {line.words} from {scene.name(order)} for a {new.colour} one",
        do=[("exchange_product", order.order_id, line.product_id, new.product_id)],
        reads=[("variants", line.name)],
        rules=[delivered_lately.of(scene.kit, order), no_sale.of(scene.kit, line)],
        facts=[
            (has_enough, "there are enough pieces in stock"),
            scene.near(new.price, "the new one costs less than ${}"),
            (new.warranty_years > 1, "the new one has more than 1 year of warranty"),
        ],
        ask="What does the new one cost?",
        instead=[give_back],
    )


@wish(delivered)
def fee(scene: Scene, order: PurchaseOrder) -> Wish:
    return Wish(
        f"get the shipping fee of {scene.name(order)} back",
        do=[("refund_shipping", order.order_id)],
        rules=[delivered_late.of(order)],
        facts=[(order.shipping == "express", "it was sent by express")],
    )


@wish()
def email(scene: Scene) -> Wish:
    first, _, last = scene.me.name.casefold().partition(" ")
    address = f"{last}.{first}{scene.rng.randint(10, 99)}@mail.example"
    want = f"change your email address to {address}"
    return Wish(want, do=[("set_email", scene.key, address)])


@wish()
def warranty(scene: Scene) -> Wish:
    product = scene.choose_unused(list(scene.kit.products.values()))
    return Wish(
        f"know how many years of warranty the {product.colour} {product.name} has",
        reads=[("variants", product.name)],
        told=product.warranty_years,
    )


@wish(orders)
def total(scene: Scene, order: PurchaseOrder) -> Wish:
    return Wish(f"know what {scene.name(order)} comes to", told=order.total)


human = hand_over(
    "speak to a person about",
    damage="damage to a parcel",
    bulk="a bulk purchase for your company",
    complaint="a complaint about the staff",
)


def identify(customer: Customer) -> tuple[str, tuple]:
    """Returns what a customer says of itself, and the call that finds it by that."""
    said = f"Your name is {customer.name} and your zip code is {customer.zip}."
    return said, ("find_customer", customer.name, customer.zip)


# The records.

PRODUCTS: dict[Category, list[str]] = {
    "electronics": "keyboard mouse tablet headset watch speaker".split(),
    "clothing": "jacket T-shirt backpack suitcase hat scarf".split(),
    "kitchen": "kettle teapot toaster pan bottle blender".split(),
    "furniture": "lamp chair mirror rug blanket shelf".split(),
}
CITIES = "Bergen Lyon Porto Graz Ghent Turin Malmo Brno Cork Basel Riga Vigo".split()


def draw(rng: Draw) -> Shop:
    """Draws the products in their colours, the customers and the orders."""
    kit = Shop(rng.today(), {}, {}, {})
    for category, names in PRODUCTS.items():
        for name in rng.of_split(names):
            price = rng.randint(8, 300)
            for colour in get_args(Colour):
                key = rng.number("", 6)
                kit.products[key] = Product(
                    key,
                    name,
                    category,
                    colour,
                    stock=rng.choice((0, 1, 4)),
                    warranty_years=rng.randint(1, 3),
                    price=price + rng.randint(-5, 5),
                    final_sale=rng.random() < 0.25,
                )
    for name in rng.people(45):
        key = rng.number("CU", 6)
        customer = kit.customers[key] = Customer(
            key,
            name,
            zip=rng.number("", 5),
            email=f"{name.casefold().replace(' ', '.')}@example.com",
            plus=rng.random() < 0.5,
            payment_methods=_methods(rng),
        )
        for _ in range(rng.randint(4, 6)):
            order = _order(rng, kit, customer)
            kit.orders[order.order_id] = order
    return kit


def _methods(rng) -> tuple[PaymentMethod, ...]:
    kinds = rng.sample(get_args(Payment), 2)
    return tuple(PaymentMethod(rng.number("pay", 4), kind) for kind in kinds)


def _order(rng, kit, customer) -> PurchaseOrder:
    key = rng.number("W", 7)
    status = rng.choice(("pending", "pending", "delivered", "delivered", "cancelled"))
    placed = rng.day(kit.today, -4, 0) if status == "pending" else rng.day(kit.today, -45, -12)
    arrived = rng.day(placed, 2, 11) if status == "delivered" else None
    lines = []
    for product in rng.sample(list(kit.products.values()), rng.randint(1, 3)):
        line = Line(
            product_id=product.product_id,
            name=product.name,
            colour=product.colour,
            price=product.price,
            quantity=rng.randint(1, 2),
            state="ordered",
            settled="",
        )
        lines.append(line)
    order = PurchaseOrder(
        key,
        customer.customer_id,
        status,
        placed_on=placed,
        delivered_on=arrived,
        lines=tuple(lines),
        shipping=rng.one_of(Method) if customer.plus else "standard",
        city=rng.name(CITIES),
        paid_with=rng.choice(customer.payment_methods).method_id,
        shipping_refunded=False,
    )
    return replace(order, shipping_refunded=delivered_late.kept(order) and rng.random() < 0.2)
