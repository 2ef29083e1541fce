"""`splitserve bench`: measurements. Loads torch only when one is started."""

from cyclopts import App, Parameter

app = App(
    name="bench",
    help="Measure this machine, this installation, or any server with OpenAI's API.",
    default_parameter=Parameter(negative=""),
    result_action="return_value",
)
app.command("splitserve.cli.bench.load:burst")
app.command("splitserve.cli.bench.load:serve")
app.command("splitserve.cli.bench.machine:engine")
app.command("splitserve.cli.bench.machine:gpu")
app.command("splitserve.cli.bench.machine:router")
app.command("splitserve.cli.bench.peers:peers")
app.command("splitserve.cli.bench.transfer:kv")
