"""Models of answers as users of pydantic write them: nested, with lists, enumerations and optional fields, and without
a word on additional properties. Prompts that ask for them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel


class Priority(StrEnum):
    LOW = "low"
    HIGH = "high"


class Person(BaseModel):
    name: str
    age: int


class Address(BaseModel):
    street: str
    city: str
    zip_code: str | None = None


class Contact(BaseModel):
    person: Person
    address: Address
    emails: list[str]


class Task(BaseModel):
    title: str
    priority: Priority
    hours: float
    is_done: bool = False


class Plan(BaseModel):
    goal: str
    tasks: list[Task]


PROMPTS: dict[type[BaseModel], str] = {
    Person: "Extract the person: Ada Lovelace is 36 years old.",
    Contact: "Extract the contact: Bob Ray, 41, lives at 12 High Street in Leeds; bob@example.com, ray@example.com.",
    Plan: "Extract the plan. Goal: move house. Tasks: pack boxes (high priority, 5 hours), rent a van (low, 1 hour).",
}
