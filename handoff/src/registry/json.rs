//! Fields of a JSON body or of a query, with refusals that name the field.

use super::HttpReply;
use serde_json::{Map, Value};

/// The fields of one request.
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of a body, which is a JSON object.
    pub(super) fn of_body(body: &[u8]) -> Result<Self, HttpReply> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(HttpReply::text(400, "the body must be a JSON object")),
            Err(error) => Err(HttpReply::text(
                400,
                format!("the body is no JSON: {error}"),
            )),
        }
    }

    /// The fields of a query. All values are numbers.
    pub(super) fn of_query(query: &str) -> Self {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let fields = pairs.map(|(name, value)| (name.to_owned(), Value::from(value)));
        Self(fields.collect())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A text.
    pub(super) fn text(&self, name: &str) -> Result<String, HttpReply> {
        match self.get(name) {
            Some(Value::String(text)) if !text.is_empty() => Ok(text.clone()),
            Some(_) => Err(wrong(name, "a text")),
            None => Err(absent(name)),
        }
    }

    /// A whole number, as a JSON number or as text.
    pub(super) fn number(&self, name: &str) -> Result<i64, HttpReply> {
        let value = self.get(name).ok_or_else(|| absent(name))?;
        let number = match value {
            Value::String(text) => text.parse().ok(),
            other => other.as_i64(),
        };
        number.ok_or_else(|| wrong(name, "a whole number"))
    }

    /// A rank: 0 or more.
    pub(super) fn rank(&self, name: &str) -> Result<u32, HttpReply> {
        let rank = self.number(name)?;
        u32::try_from(rank).map_err(|_| wrong(name, "a rank"))
    }

    /// A rank that is 0 when it is absent.
    pub(super) fn rank_or_zero(&self, name: &str) -> Result<u32, HttpReply> {
        match self.get(name) {
            Some(_) => self.rank(name),
            None => Ok(0),
        }
    }

    /// A count of ranks: 1 or more, and 1 when it is absent.
    pub(super) fn count(&self, name: &str) -> Result<u32, HttpReply> {
        match self.get(name) {
            Some(_) => match self.rank(name)? {
                0 => Err(wrong(name, "1 or more")),
                count => Ok(count),
            },
            None => Ok(1),
        }
    }

    /// The first of two names that the request has.
    pub(super) fn either<'a>(&self, first: &'a str, second: &'a str) -> &'a str {
        if self.get(first).is_some() {
            first
        } else {
            second
        }
    }

    /// Unsigned 64-bit numbers.
    pub(super) fn rooms(&self, name: &str) -> Result<Vec<u64>, HttpReply> {
        let Some(Value::Array(rooms)) = self.get(name) else {
            return Err(wrong(name, "a list"));
        };
        rooms.iter().map(|room| room_number(name, room)).collect()
    }

    /// An unsigned 64-bit number.
    pub(super) fn room(&self, name: &str) -> Result<u64, HttpReply> {
        let value = self.get(name).ok_or_else(|| absent(name))?;
        room_number(name, value)
    }
}

fn room_number(name: &str, value: &Value) -> Result<u64, HttpReply> {
    let number = match value {
        Value::String(text) => text.parse().ok(),
        other => other.as_u64(),
    };
    number.ok_or_else(|| wrong(name, "a room"))
}

fn absent(name: &str) -> HttpReply {
    HttpReply::text(400, format!("{name} is missing"))
}

fn wrong(name: &str, wanted: &str) -> HttpReply {
    HttpReply::text(400, format!("{name} must be {wanted}"))
}
