//! The flags of a connection, and the environment variables in place of absent flags.
//!
//! clap would read a variable although its flag is there, and fail on it. So the variables are read here.

use super::{CALL_TIMEOUT, Connection, Transport, parse_masters, parse_timeout};
use clap::builder::NonEmptyStringValueParser;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};
use kvpool_types::namespace::DEFAULT_NAME;
use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

const MASTER: &str = "KVPOOL_MASTER";
const NAMESPACE: &str = "KVPOOL_NAMESPACE";
const TOKEN_FILE: &str = "KVPOOL_TOKEN_FILE";
const TLS_CA: &str = "KVPOOL_TLS_CA";
const TLS_CERT: &str = "KVPOOL_TLS_CERT";
const TLS_KEY: &str = "KVPOOL_TLS_KEY";
const TLS_SERVER_NAME: &str = "KVPOOL_TLS_SERVER_NAME";

/// The pool to use, and how to connect to it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
struct ConnectionFlags {
    /// Addresses of one or more masters, HOST:PORT[,HOST:PORT...] with or without http://, or
    /// https://HOST:PORT for TLS. The client finds the leader. Or the etcd that lists the masters:
    /// etcd://HOST:PORT[,HOST:PORT...]/CLUSTER [env: KVPOOL_MASTER] [default: http://127.0.0.1:7070]
    #[arg(long, global = true, value_name = "URL", value_parser = parse_masters)]
    master: Option<String>,
    /// Namespace of the keys [env: KVPOOL_NAMESPACE] [default: default]
    #[arg(long, global = true, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    namespace: Option<String>,
    /// Transport between this process and the store nodes
    #[arg(long, global = true, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,
    /// File with the token that says who you are, for a pool that asks; read again when it changes
    /// [env: KVPOOL_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Timeout of one operation, such as 500ms or 10s
    #[arg(long, global = true, value_name = "TIME", value_parser = parse_timeout, default_value = CALL_TIMEOUT)]
    timeout: Duration,
    /// Certificates of the authority that signs the pool's certificates, for https:// and tls:// addresses
    /// [env: KVPOOL_TLS_CA]
    #[arg(long, global = true, value_name = "PEM")]
    tls_ca: Option<PathBuf>,
    /// Certificate to present to the pool [env: KVPOOL_TLS_CERT]
    #[arg(long, global = true, value_name = "PEM")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert [env: KVPOOL_TLS_KEY]
    #[arg(long, global = true, value_name = "PEM")]
    tls_key: Option<PathBuf>,
    /// Name that every certificate of the pool must have, instead of the called host
    /// [env: KVPOOL_TLS_SERVER_NAME]
    #[arg(long, global = true, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    tls_server_name: Option<String>,
}

impl FromArgMatches for Connection {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let flags = ConnectionFlags::from_arg_matches(matches)?;
        flags
            .or_from(variable)
            .map_err(|why| Error::raw(ErrorKind::ValueValidation, why))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Connection {
    fn augment_args(command: Command) -> Command {
        ConnectionFlags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        ConnectionFlags::augment_args_for_update(command)
    }
}

impl ConnectionFlags {
    /// The connection of these flags, and of the variables where flags are absent. An empty variable counts as not
    /// set, but an empty name is refused. An error names its variable.
    fn or_from(self, variable: impl Fn(&str) -> Option<OsString>) -> Result<Connection, String> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let file =
            |flag: Option<PathBuf>, name: &str| flag.or_else(|| set(name).map(PathBuf::from));
        let text = |flag: Option<String>, name: &str| {
            if flag.is_some() {
                return Ok(flag);
            }
            let value = set(name).map(OsString::into_string).transpose();
            value.map_err(|_| unusable(name, &"it is not UTF-8"))
        };
        // An empty name mostly comes from an unset variable of a script. Without it, the call would mean others.
        let given_name = |flag: Option<String>, name: &str| {
            if flag.is_none() && variable(name).is_some_and(|value| value.is_empty()) {
                return Err(unusable(name, &"it is empty"));
            }
            text(flag, name)
        };
        let master = match self.master {
            Some(master) => Some(master),
            None => text(None, MASTER)?
                .map(|named| parse_masters(&named).map_err(|why| unusable(MASTER, &why)))
                .transpose()?,
        };
        let namespace = given_name(self.namespace, NAMESPACE)?;
        Ok(Connection {
            master,
            namespace: namespace.unwrap_or_else(|| DEFAULT_NAME.to_owned()),
            transport: self.transport,
            token_file: file(self.token_file, TOKEN_FILE),
            timeout: self.timeout,
            tls_ca: file(self.tls_ca, TLS_CA),
            tls_cert: file(self.tls_cert, TLS_CERT),
            tls_key: file(self.tls_key, TLS_KEY),
            tls_server_name: given_name(self.tls_server_name, TLS_SERVER_NAME)?,
        })
    }
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

fn unusable(name: &str, why: &dyn Display) -> String {
    format!("the environment variable {name} cannot be used: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStringExt;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: ConnectionFlags,
    }

    fn read(line: &[&str], variables: &[(&str, OsString)]) -> Result<Connection, String> {
        let line = Line::try_parse_from([&["kvctl"][..], line].concat()).unwrap();
        line.flags.or_from(|name| {
            let mut variables = variables.iter();
            let (_, value) = variables.find(|(known, _)| *known == name)?;
            Some(value.clone())
        })
    }

    fn all_of(value: &OsStr) -> Vec<(&'static str, OsString)> {
        let names = [
            MASTER,
            NAMESPACE,
            TOKEN_FILE,
            TLS_CA,
            TLS_CERT,
            TLS_KEY,
            TLS_SERVER_NAME,
        ];
        names.map(|name| (name, value.to_os_string())).into()
    }

    #[test]
    fn a_variable_counts_only_where_its_flag_is_absent() {
        let flags = [
            ("--master", "a:1"),
            ("--namespace", "team"),
            ("--token-file", "token"),
            ("--tls-ca", "ca"),
            ("--tls-cert", "cert"),
            ("--tls-key", "key"),
            ("--tls-server-name", "name"),
        ];
        let line = flags.map(|(flag, value)| [flag, value]).concat();
        let wrong = OsString::from_vec(vec![0xff]);
        let read_all = read(&line, &all_of(&wrong)).unwrap();
        assert_eq!(read_all.master.as_deref(), Some("http://a:1"));
        assert_eq!(read_all.namespace, "team");
        assert_eq!(read_all.token_file, Some("token".into()));
        assert_eq!(read_all.tls_server_name.as_deref(), Some("name"));

        let both = "b:2,c:3".into();
        let named = read(&[], &[(MASTER, both), (NAMESPACE, "other".into())]).unwrap();
        assert_eq!(named.master.as_deref(), Some("http://b:2,http://c:3"));
        assert_eq!(named.namespace, "other");
    }

    #[test]
    fn an_empty_variable_counts_as_not_set_unless_it_is_a_name_and_a_wrong_one_is_named() {
        let empty = all_of(OsStr::new(""));
        let names = ["--namespace", "team", "--tls-server-name", "name"];
        let read_empty = read(&names, &empty).unwrap();
        assert_eq!((read_empty.master, read_empty.tls_ca), (None, None));
        assert_eq!((read_empty.tls_cert, read_empty.tls_key), (None, None));
        assert_eq!(read_empty.token_file, None);
        assert_eq!(read_empty.namespace, "team");
        for (flags, name) in [(&names[..2], TLS_SERVER_NAME), (&names[2..], NAMESPACE)] {
            let refused = read(flags, &empty).unwrap_err();
            assert!(
                refused.contains(name) && refused.contains("it is empty"),
                "{refused}"
            );
        }
        let unset = read(&[], &[]).unwrap();
        assert_eq!(unset.namespace, DEFAULT_NAME);
        assert_eq!(unset.tls_server_name, None);

        let wrong = read(&[], &[(MASTER, "zz".into())]).unwrap_err();
        assert!(
            wrong.contains(MASTER) && wrong.contains("the port is missing"),
            "{wrong}"
        );
        let not_text = OsString::from_vec(vec![0xff]);
        let wrong = read(&[], &[(NAMESPACE, not_text)]).unwrap_err();
        assert!(
            wrong.contains(NAMESPACE) && wrong.contains("UTF-8"),
            "{wrong}"
        );
    }
}
