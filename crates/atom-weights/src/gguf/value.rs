//! Metadata values. Arrays keep about the size they have in the file: a vocabulary is one text with
//! ends, numbers are their bytes.

/// A value's type, as numbered by the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    Text = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

pub(crate) enum Value {
    Integer(Kind, i128),
    Float(Kind, f64),
    Bool(bool),
    Text(String),
    Texts(Texts),
    /// Elements of a fixed size, little-endian.
    Numbers(Kind, Box<[u8]>),
}

/// Many strings in one: string `i` ends at `ends[i]`, where the next begins.
#[derive(Default)]
pub(crate) struct Texts {
    text: String,
    ends: Vec<usize>,
}

impl Kind {
    pub(crate) const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// Bytes of a value; `None` for strings and arrays, whose size is in the file.
    pub(crate) const fn bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::Text => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

impl Value {
    /// A single number or truth value from its bytes. `None` where no such value exists: a bool of 7.
    pub(crate) fn scalar(kind: Kind, bytes: &[u8]) -> Option<Self> {
        Some(match kind {
            Kind::F32 | Kind::F64 => Self::Float(kind, float(kind, bytes)?),
            Kind::Bool => match bytes {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                _ => return None,
            },
            _ => Self::Integer(kind, integer(kind, bytes)?),
        })
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn as_integer(&self) -> Option<i128> {
        match self {
            Self::Integer(_, value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(_, value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn as_strings(&self) -> Option<Vec<&str>> {
        match self {
            Self::Texts(texts) => Some(texts.iter().collect()),
            _ => None,
        }
    }

    pub(crate) fn as_i32s(&self) -> Option<Vec<i32>> {
        self.elements(|kind, bytes| integer(kind, bytes)?.try_into().ok())
    }

    pub(crate) fn as_f32s(&self) -> Option<Vec<f32>> {
        self.elements(|kind, bytes| float(kind, bytes).map(|value| value as f32))
    }

    fn elements<T>(&self, read: impl Fn(Kind, &[u8]) -> Option<T>) -> Option<Vec<T>> {
        let Self::Numbers(kind, bytes) = self else { return None };
        bytes.chunks_exact(kind.bytes()?).map(|element| read(*kind, element)).collect()
    }

    /// What the value is, for a message: short, whatever its size.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Integer(kind, value) => format!("{value} ({})", kind.name()),
            Self::Float(kind, value) => format!("{value} ({})", kind.name()),
            Self::Bool(value) => format!("{value}"),
            Self::Text(text) => format!("a string of {} bytes", text.len()),
            Self::Texts(texts) => format!("an array of {} strings", texts.ends.len()),
            Self::Numbers(kind, bytes) => {
                let count = bytes.len() / kind.bytes().unwrap_or(1);
                format!("an array of {count} elements of type {}", kind.name())
            }
        }
    }
}

impl Texts {
    pub(crate) fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.text[start..end])
    }
}

fn integer(kind: Kind, bytes: &[u8]) -> Option<i128> {
    Some(match kind {
        Kind::U8 => u8::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::I8 => i8::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::U16 => u16::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::I16 => i16::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::U32 => u32::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::I32 => i32::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::U64 => u64::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::I64 => i64::from_le_bytes(bytes.try_into().ok()?).into(),
        Kind::F32 | Kind::F64 | Kind::Bool | Kind::Text | Kind::Array => return None,
    })
}

fn float(kind: Kind, bytes: &[u8]) -> Option<f64> {
    match kind {
        Kind::F32 => Some(f32::from_le_bytes(bytes.try_into().ok()?).into()),
        Kind::F64 => Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}
