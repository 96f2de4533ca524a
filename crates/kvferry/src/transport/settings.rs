//! Settings of transports: each is declared in the folder of its transport, which also reads it.

use super::Elsewhere;
use crate::error::{Error, Result};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// A setting of one transport, as the transport declares it.
#[derive(Clone, Copy)]
pub struct TransportSetting {
    name: &'static str,
    variable: Option<&'static str>,
    about: &'static str,
    default: &'static str,
    /// Parses a value to the form in which it is kept; the error says which values there are.
    parse: fn(&str) -> Result<&'static str, &'static str>,
}

impl TransportSetting {
    /// A setting that is on or off, and off if it was not set. For the rest see [`TransportSetting::new`].
    pub const fn switch(
        name: &'static str,
        variable: Option<&'static str>,
        about: &'static str,
    ) -> Self {
        Self::new(name, variable, about, OFF, switch)
    }

    /// A setting with values of its own. `name` begins with the transport's; `variable` is the environment
    /// variable that sets it; `about` is its meaning and values in one line, as in `docs/configuration.md`.
    /// `parse` returns the form in which a value is kept, or says which values there are.
    pub const fn new(
        name: &'static str,
        variable: Option<&'static str>,
        about: &'static str,
        default: &'static str,
        parse: fn(&str) -> Result<&'static str, &'static str>,
    ) -> Self {
        Self { name, variable, about, default, parse }
    }

    /// The setting's name in [`TransportSettings::set`] and in the JSON of a
    /// [`Config`](crate::Config). It begins with the transport's name, except those of version 1.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The environment variable that sets it, if one does.
    pub fn variable(&self) -> Option<&'static str> {
        self.variable
    }

    /// The setting's meaning and values, in one line.
    pub fn about(&self) -> &'static str {
        self.about
    }

    /// The value that applies if none was set.
    pub fn default_value(&self) -> &'static str {
        self.default
    }
}

impl fmt::Debug for TransportSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransportSetting[{}]", self.name)
    }
}

/// Parses a setting that is on or off.
fn switch(text: &str) -> Result<&'static str, &'static str> {
    match text.to_ascii_lowercase().as_str() {
        ON | "on" | "1" => Ok(ON),
        OFF | "off" | "0" => Ok(OFF),
        _ => Err("must be true or false"),
    }
}

const ON: &str = "true";
const OFF: &str = "false";

/// The value of every setting that the transports of the program have, by name.
#[derive(Clone, PartialEq, Eq)]
pub struct TransportSettings(BTreeMap<&'static str, &'static str>);

impl TransportSettings {
    /// The settings that the transports of the program have: those of this crate, and those that are linked
    /// ([`transport::link`](crate::transport::link)).
    pub fn all() -> impl Iterator<Item = &'static TransportSetting> {
        super::settings()
    }

    /// Sets a value: text as in the environment, or `true` or `false`. `mooncake` may be off also where the program has not
    /// linked that transport.
    ///
    /// # Errors
    /// `InvalidArgument` if no transport has the setting, or the setting does not take the value.
    pub fn set(&mut self, name: &str, value: impl ToString) -> Result<()> {
        let known = Self::all().find(|setting| setting.name == name);
        let elsewhere = Elsewhere::of_setting(name).filter(|_| known.is_none());
        let Some(setting) = known.or(elsewhere.map(Elsewhere::setting)) else {
            let known: Vec<_> = Self::all().map(|setting| setting.name).collect();
            let what = format!("unknown setting; those of transports are {}", known.join(", "));
            return Err(Error::invalid(what).with("setting", name));
        };
        let value = value.to_string();
        let parsed = (setting.parse)(&value).map_err(|values| {
            Error::invalid(format!("the setting {name} {values}")).with("value", &value)
        })?;
        match elsewhere {
            None => drop(self.0.insert(setting.name, parsed)),
            Some(elsewhere) if parsed != setting.default => {
                return Err(elsewhere.is_not_linked().with("setting", name));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// The value of a setting; `None` if no transport has it.
    pub fn get(&self, name: &str) -> Option<&'static str> {
        self.0.get(name).copied()
    }

    /// The values of the environment, and the defaults for variables that are not set.
    pub(crate) fn from_env(read: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut settings = Self::default();
        for setting in Self::all() {
            let Some(variable) = setting.variable else { continue };
            let Some(text) = read(variable) else { continue };
            let set = settings.set(setting.name, text.trim());
            set.map_err(|e| e.with("variable", variable))?;
        }
        Ok(settings)
    }

    /// The value of a setting, or its default.
    pub fn value(&self, setting: &TransportSetting) -> &'static str {
        self.get(setting.name).unwrap_or(setting.default)
    }

    /// Whether a setting that is on or off is on.
    pub fn is_on(&self, setting: &TransportSetting) -> bool {
        self.value(setting) == ON
    }
}

impl Default for TransportSettings {
    fn default() -> Self {
        Self(Self::all().map(|setting| (setting.name, setting.default)).collect())
    }
}

impl fmt::Debug for TransportSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(&self.0).finish()
    }
}

impl Serialize for TransportSettings {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            match *value {
                ON => map.serialize_entry(name, &true)?,
                OFF => map.serialize_entry(name, &false)?,
                text => map.serialize_entry(name, text)?,
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for TransportSettings {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Value {
            Switch(bool),
            Text(String),
            Other(IgnoredAny),
        }

        let mut settings = Self::default();
        for (name, value) in BTreeMap::<String, Value>::deserialize(from)? {
            let set = match value {
                Value::Switch(on) => settings.set(&name, on),
                Value::Text(text) => settings.set(&name, text),
                // No setting takes it.
                Value::Other(_) => settings.set(&name, "neither text nor true or false"),
            };
            set.map_err(D::Error::custom)?;
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_a_setting_does_not_take_is_refused_by_its_name() {
        let mut settings = TransportSettings::default();
        for (name, text, expected) in [
            ("file_engine", "URING", "uring"),
            ("ptracer_any", "on", "true"),
            ("ptracer_any", "0", "false"),
        ] {
            settings.set(name, text).expect("a value");
            assert_eq!(settings.get(name), Some(expected));
        }
        for (name, text) in [("file_engine", "aio"), ("ptracer_any", "maybe"), ("verbs_gid", "3")] {
            let e = settings.set(name, text).expect_err("no such value");
            assert!(e.to_string().contains(name), "{e}");
        }
    }

    #[test]
    fn the_environment_sets_what_has_a_variable() {
        let read = |name: &str| (name == "KVFERRY_FILE_ENGINE").then(|| "posix".to_owned());
        let settings = TransportSettings::from_env(read).expect("a value");
        assert_eq!(settings.get("file_engine"), Some("posix"));
        let e = TransportSettings::from_env(|_| Some("nonsense".into())).expect_err("no value");
        assert!(e.context("variable").is_some_and(|name| name.starts_with("KVFERRY_")), "{e}");
    }

    #[test]
    fn every_default_is_a_value() {
        for setting in TransportSettings::all() {
            assert_eq!((setting.parse)(setting.default), Ok(setting.default), "{setting:?}");
        }
    }
}
