"""Kinds and chains with everyday wording: plain toolboxes whose tools could take each other's results."""

from dataclasses import replace

from examples.demo_model.kinds import Chain, Kind, arg, kind
from examples.demo_model.kinds_dev import DIR, PATH
from examples.demo_model.kinds_dev import KINDS as DEV_KINDS
from examples.demo_model.kinds_office import KINDS as OFFICE_KINDS
from examples.demo_model.kinds_world import KINDS as WORLD_KINDS

BASE: dict[str, Kind] = {k.key: k for k in [*WORLD_KINDS, *DEV_KINDS, *OFFICE_KINDS]}


def reworded(key: str, **changes: str) -> Kind:
    return replace(BASE[key], **changes)


KINDS = [
    reworded("weather", names="get_weather|weather|current_weather|check_weather|weather_lookup|get_current_weather",
        imp="[let me know|tell me|check|see|find out] [how it looks outside|what it's like outdoors|how cold it is getting|whether the sun is out|if it's wet] in {city}|check on the sky over {city}",
        ask="[will|would] I [freeze|get wet|sweat|need a raincoat] in {city}[ today| tonight|]|how is it in {city} [right now|today|at the moment]|how's {city} [today|right now], [warm or cold|sunny or grey]|is it [nice|pleasant|freezing|wet|stormy] out in {city}|what [is it like|are things like] [out there |outside |]in {city}|is the sun [out|shining] in {city}|do people need [coats|umbrellas] in {city} today|how many degrees does {city} have|shall I [pack|bring] [warm clothes|shorts|an umbrella] for {city}|is it [T-shirt|jacket|beach] weather in {city}|what's the weather in {city}|how's the weather in {city}"),
    reworded("time", names="get_time|current_time|world_clock|local_time|get_local_time|time_in_city"),
    reworded("forecast", names="get_forecast|weather_forecast|forecast"),
    kind("flight_status", "flight_status|get_flight[_status|]|check_flight|track_flight|flight_info|flight_tracker", "[Get|Check|Look up] the [current |]status of a flight|Status, gate and delay of a flight|Flight [status|tracking] by number",
        [arg("flight", "flight|flight_number|number|flight_no|code|id", "flight", "Flight number|The flight")],
        imp="[check|look up|see|find out] [whether|if] flight {flight} is [on time|delayed|cancelled|late]|[check|get|look up|tell me] the status of [flight |]{flight}|track flight {flight}|see how flight {flight} is doing",
        ask="[is|will] [flight |]{flight} [on time|delayed|cancelled|late|still flying|be on time|land on time]|has [flight |]{flight} [been cancelled|been delayed|landed|taken off|departed|left|arrived][ yet| already|]|did [flight |]{flight} [land|leave|take off|get cancelled]|when does [flight |]{flight} [land|arrive|leave|depart|board]|which gate does [flight |]{flight} leave from|from which gate is {flight}|what's [happening|going on|up] with [flight |]{flight}|any delay on {flight}|was {flight} cancelled",
        out="status~state=pick:on time,delayed,cancelled,landed,boarding,departed,in the air,scheduled,diverted;gate~gate_number=pick:A1,A12,B4,B22,C7,C15,D3,E9,F2,G11", text="{status}, gate {gate}|{flight}: {status} (gate {gate})|{status}, {gate}",
        say="Flight {flight} is {status}, gate {gate}.|{flight}: {status}, gate {gate}.|The flight {flight} is {status} (gate {gate}).", topic="a flight"),
    reworded("track", names="track_[package|parcel|shipment]|package_status|parcel_tracking|tracking_lookup",
        ask="where is [my |the |][package|parcel|shipment] {number}[ now|]|has [package|parcel] {number} [arrived|been delivered|left the depot|moved]|[when will|did|does] [parcel|package|shipment] {number} [arrive|come|get here]|what happened to [parcel|package] {number}|which city is [parcel|package] {number} in"),
    reworded("contact", names="find_contact|get_contact|lookup_contact|contact_lookup|search_contacts|phone_lookup|get_phone_number"),
    kind("phone_of", "get_phone[_number|]|phone_lookup|find_phone_number|lookup_phone|phone_book|call_directory", "[Get|Find|Look up] the phone number of a [person|contact]|Phone book",
        [arg("name", "name|person|who|contact|full_name", "person", "Name|Whose number")], imp="[find|look up|get|give me|dig out] {name}'s [phone |]number|[find|look up|get] the [phone |]number [of|for] {name}", ask="[what's|what is] {name}'s [phone |]number|how do I call {name}|[on|under] which number [is {name}|do I reach {name}]|do we have a number for {name}|I need to ring {name}, what's the number",
        out="phone~number~tel~phone_number=phone", text="{phone}|{name}: {phone}", say="The number of {name} is {phone}.|{name}: {phone}.|You can call {name} at {phone}.", topic="a phone number"),
    kind("customer_by_email", "find_customer|lookup_customer|get_customer[_by_email|]|search_customers|customer_lookup|find_client", "[Find|Look up] a customer by [email|email address]|[Get|Returns] the id of the customer with an email address|Customer [search|lookup]",
        [arg("email", "email|email_address|mail|address", "email", "Email [address |]of the customer|Email")], imp="[find|look up|search for|get] the customer [with [the |]email|with the address|whose email is|who uses|behind] {email}|look {email} up among our customers", ask="which customer [has [the |]email|uses|is behind|belongs to] {email}|who is the customer with [the |]email {email}|is {email} [a customer|one of our customers|known to us]|do we know a customer with the address {email}",
        out="id~customer_id~customer~number=id;name~full_name~customer_name=person", text="{id} {name}|{name}, id {id}|customer {id}: {name}", say="{email} is customer {id}, {name}.|The customer is {name} (id {id}).|{name} has the customer id {id}.", topic="a customer"),
    reworded("customer", names="find_customer|lookup_customer|get_customer|search_customers|customer_lookup|find_client"),
    kind("order_list", "list_orders|get_orders|orders_of_customer|customer_orders|order_history|find_orders", "[List|Show|Get] [all |the |]orders of a customer|Orders by customer id|Order history of a customer",
        [arg("customer", "customer_id|customer|id|client_id|customer_number", "id", "Customer id|Id of the customer")], imp="[list|show|get|pull up] [the |all |]orders [of|for|from] customer {customer}|show me what customer {customer} [ordered|bought]", ask="[what|which things] did customer {customer} [order|buy]|which orders [belong to|are from|has] customer {customer}|what has customer {customer} ordered[ so far|]",
        out="orders~items~results~purchases=orderrows", text="{orders}|{orders_and}", say="The orders are {orders_and}.|Customer {customer} has these orders: {orders_and}.|Orders: {orders_and}.", topic="orders"),
    reworded("order", names="get_order[_status|]|order_status|check_order|lookup_order|track_order|order_lookup"),
    reworded("user", names="get_user|find_user|lookup_user|user_info|get_profile"),
    reworded("employee", names="find_employee|lookup_employee|get_employee|employee_lookup|org_chart|staff_lookup"),
    reworded("country_info", names="country_info|get_country[_info|]|country_facts|lookup_country|get_capital"),
    reworded("hotel"), reworded("restaurant"), reworded("distance"), reworded("currency"), reworded("units"), reworded("news"), reworded("recipe"),
    reworded("web_search", names="search_web|web_search|search|google|internet_search|search_online"),
    reworded("wiki", names="wikipedia|wiki_lookup|encyclopedia|get_article|lookup_topic|wiki_summary"),
    reworded("translate", names="translate[_text|]|translator|translation"),
    reworded("synonym"), reworded("note_search", names="search_notes|find_note[s|]|notes_search|search_docs"),
    kind("define", "define[_word|]|dictionary[_lookup|]|get_definition|word_definition|lookup_word|meaning_of", "[Define|Look up] a word|[Get|Return] the [definition|meaning] of a word|Dictionary [lookup|definition]",
        [arg("word", "word|term|text|entry", "word", "[The|] word[ to define|]|Term")],
        imp="[find|give me|look up|get|tell me] the [definition|meaning|exact meaning] of [the word |]{word}|define {word}|explain the word {word} to me|look up what {word} means|[check|consult] the dictionary for {word}",
        ask="[what's|what is] the [definition|meaning] of [the word |]{word}|what does [the word |]{word} mean|what do people mean by {word}|someone called me {word}, what does that mean|I read the word {word}, what is it|how does the dictionary define {word}|the word {word}, what does it stand for|definition of {word}|meaning of {word}",
        out="definition~meaning~gloss~text=definition", text="{definition}|{word}: {definition}|{word} (noun): {definition}|{word} (adjective): {definition}|{word} (verb): {definition}|{word} - {definition}", say="{word} means: {definition}.|The definition of {word}: {definition}.|{word}: {definition}.|It means: {definition}.", topic="a definition"),
    kind("read_text", "read_file|read_file|read_text_file|open_file|get_file|get_file_contents|view_file|cat_file|show_file", "[Read|Return|Show|Load|Get] the [contents|content|text] of a [file|text file]|Read a [text |]file [and return its contents|from disk|]",
        [arg("path", PATH, "path", "[Path|The path] of the file|File to read|Path")],
        imp="[read|open|show me|display|print|cat|pull up|bring up] [the file |]{path}[ for me|]|[show me|tell me|give me|let me see] [what's in|what is in|what's inside|what is inside|everything in|the contents of|the text of] [the file |]{path}|[read|print] {path} [out |aloud |]to me|see what {path} says|take a look inside {path}|quote {path}",
        ask="[what's|what is] [inside|in|written in|inside of] [the file |]{path}|what does [the file |]{path} [say|contain|hold|look like]|can I see [what's in |inside |]{path}|what have we got in {path}|could you show me what's in {path}|what text is in {path}",
        out="content~text~contents=filetext", text="{content}", say="{path}:\n{content}|The file says:\n{content}|Contents of {path}:\n{content}|{path} contains:\n{content}", topic="a file"),
    kind("file_setting", "read_file|read_file|read_text_file|open_file|get_file|get_file_contents|view_file|cat_file|show_file", "[Read|Return|Show|Load|Get] the [contents|content|text] of a [file|text file]|Read a [text |]file [and return its contents|from disk|]",
        [arg("path", PATH, "path", "[Path|The path] of the file|File to read|Path")],
        imp="[look up|find|check|tell me] [the value of |the setting |]{ask_key} in {path}|[read|open] {path} and [tell me|find] {ask_key}|look into {path} and tell me what {ask_key} is", ask="[what's|what is] {ask_key} [set to |]in {path}|what value does {ask_key} have in {path}|in {path}, what is {ask_key}|which {ask_key} [is in|stands in] {path}",
        out="content~text~contents=kvfile", text="{content}", say="{ask_key} is {ask_value}.|In {path}, {ask_key} is {ask_value}.|The value of {ask_key} is {ask_value}.", topic="a value in a file"),
    kind("list_folder", "list_[directory|files|folder|dir]|ls|list_directory|show_directory|get_files|dir_listing", "[List|Show] [the |]files [in|of] a [directory|folder]|[List|Show] the contents of a [directory|folder]|Directory listing",
        [arg("path", DIR, "folder", "[Path of the|The] [directory|folder]|Directory to list")],
        imp="[list|show me|give me|print] [the files|all files|everything|what's] [in|under|inside|below] [the folder |the directory |]{path}|[show|tell] me which files are [in|under] {path}|see what we have [in|under] {path}|ls {path}",
        ask="[what's|what is|which files are|what files are|what do we have|what lies] [in|inside|under] [the folder |the directory |]{path}|what does [the folder |the directory |]{path} [contain|hold]|which files does {path} have|is there anything [in|under] {path}|how does {path} look inside",
        out="files~entries~contents~names=namelist", text="{files}", say="{path} contains {files_and}.|The files are {files_and}.|In {path} there are {files_and}.|There is {files_and}.", topic="a folder"),
    kind("list_long", "list_[directory|files|folder|dir]|ls|list_directory|show_directory|get_files|dir_listing", "[List|Show] [the |]files [in|of] a [directory|folder]|[List|Show] the contents of a [directory|folder]|Directory listing",
        [arg("path", DIR, "folder", "[Path of the|The] [directory|folder]|Directory to list")],
        imp="[list|show me|give me|print] [the files|all files|everything|what's] [in|under|inside|below] [the folder |the directory |]{path}|[show|tell] me which files are [in|under] {path}|[show|list] the details of the files in {path}",
        ask="[what's|what is|which files are|what files are|what do we have] [in|inside|under] [the folder |the directory |]{path}|what does [the folder |the directory |]{path} [contain|hold]|how big are the files in {path}",
        out="listing~output~result=longlist", text="{listing}", say="{path} contains:\n{listing}|The listing of {path}:\n{listing}|Here it is:\n{listing}", topic="a folder"),
    kind("search_text", "search_files|grep|grep_files|search_text|find_in_files|search_in_files|search_code|find_text", "[Search|Look] for [text|a word|a string|a pattern] in [the files of |]a [folder|directory]|[Grep|Search] files for [text|a pattern]|Find lines that contain a text",
        [arg("pattern", "pattern|query|text|string|needle|search", "needle", "[Text|Pattern|What] to search for|Search text"), arg("path", "path|folder|directory|dir|root", "folder", "[Folder|Where] to search|Directory to search in")],
        imp="[look|search|check|hunt] for [the word |the text |the string |][{pattern}|\"{pattern}\"|'{pattern}'] [in|under|inside|within] [the folder |the directory |]{path}|[look|search] [in|through|inside] {path} for [the word |the text |][{pattern}|\"{pattern}\"]|find [the word |the string |every |][{pattern}|\"{pattern}\"] in {path}|find [all |]lines [with|that contain|that mention] [{pattern}|\"{pattern}\"] in {path}|see where {pattern} [appears|is mentioned|shows up] in {path}|grep [for |]{pattern} in {path}",
        ask="where [does the word|does] {pattern} [appear|occur|show up] in {path}|[which|what] files [in|under] {path} [mention|contain|use|have] [the word |]{pattern}|is {pattern} mentioned anywhere [in|under] {path}|does {path} have any {pattern}|where in {path} is {pattern}",
        out="matches~results~hits~lines=hits", text="{matches}", say="Found: {matches_and}.|{pattern} is in {matches_and}.|Matches: {matches_and}.", topic="a text search"),
    kind("search_file", "search_files|grep|grep_files|search_text|find_in_files|search_in_files|search_code|find_text", "[Search|Look] for [text|a word|a string|a pattern] in [the files of |]a [folder|directory]|[Grep|Search] files for [text|a pattern]|Find lines that contain a text",
        [arg("pattern", "pattern|query|text|string|needle|search", "needle", "[Text|Pattern|What] to search for|Search text"), arg("path", "path|folder|directory|dir|root", "folder", "[Folder|Where] to search|Directory to search in")],
        imp="find [the file|a file] [that mentions|with] {pattern} in {path}|[look|search] for [the word |]{pattern} in {path}", ask="which file in {path} [mentions|has|contains] {pattern}", out="file~path_found~match=under;line~line_number=int:1:300", text="{file}:{line}|{file}:{line}: {pattern}|{file}", say="{pattern} is in {file}.|Found {pattern} in {file}.", topic="a text search"),
    reworded("find_file", names="find_file|locate_file|search_files_by_name|file_finder|locate"),
    reworded("delete_file", names="delete_file|remove_file"), reworded("write_file", names="write_file|save_file|create_file"),
    kind("shell", "run_command|run_shell|execute_command|shell|bash|run_shell_command|terminal|exec", "[Run|Execute] a [shell |]command [and return its output|in a shell|]", [arg("command", "command|cmd|shell_command|line", "shellcmd", "[The |]command[ to run|]|Shell command")],
        imp="[run|execute] [the command |][`{command}`|{command}|'{command}'|\"{command}\"][ and show me the output| in the shell| for me|]|[show|give] me the output of [`{command}`|{command}]|use the shell to run {command}|type {command} in the terminal", ask="what does [`{command}`|{command}] [print|say|show|return]|what's the output of [`{command}`|{command}]|what do I get from [`{command}`|{command}]|could you run [`{command}`|{command}] and tell me what it says",
        out="output~stdout~result=cmdout", text="{output}", say="The output:\n{output}|It printed:\n{output}|{command} printed:\n{output}", topic="a shell command"),
    kind("calc", "calculate|calculator|calc|compute|evaluate|evaluate_expression|do_math", "[Evaluate|Compute|Calculate] [an arithmetic|a math|a] expression|Calculator|Does arithmetic",
        [arg("expression", "expression|expr|formula|input|math", "wordcalc", "[The|] expression [to evaluate|]|Arithmetic expression")],
        imp="{expression}", ask="", out="result~value~answer~output=calc", text="{result}|= {result}", say="The result is {result}.|That is {result}.|It comes to {result}.", topic="arithmetic"),
    kind("reminder", "set_reminder|create_reminder|add_reminder|remind_me|reminder|new_reminder", "[Set|Create] a reminder|Remind [the user|me] [of something |]at a time", [arg("text", "text|what|message|task|title|about|note", "errand", "What to remind of|Text of the reminder"), arg("time", "time|when|at|remind_at", "when", "When|Time")],
        imp="remind me {at} to {text}|remind me to {text} {at}|[set|create|add|make] a reminder for {time} to {text}|for {time}, set a reminder to {text}|{at} I must {text}, [set a reminder|remind me]|[schedule|put in] a reminder for {time}: {text}|set a reminder to {text} for {time}|[make sure|see to it] that I {text} {at}|set a reminder {at} to {text}|remind me about this {at}: {text}|{at}, remind me to {text}",
        ask="can I get a reminder for {time} to {text}|I have to {text} {at}, [can|could] you remind me|would you remind me to {text} {at}|I always forget to {text}, so remind me {at}|I need a reminder for {time} to {text}", out="id~reminder_id~ref=id", text="set ({id})|{id}|reminder {id} set", say="I will remind you to {text} ({time}, {id}).|The reminder {id} is set for {time}: {text}.|Done: {text}, {time} ({id}).", topic="a reminder"),
    reworded("http", names="fetch_url|open_page|get_page|fetch_page|read_url|http_get"),
    reworded("event"), reworded("agenda"), reworded("task"), reworded("timer"), reworded("note"), reworded("message"), reworded("email"),
]  # fmt: skip
EVERYDAY: dict[str, Kind] = {k.key: k for k in KINDS}
EVERYDAY["file_setting"] = replace(EVERYDAY["file_setting"], follow="")  # another file has other settings

# Tools that belong together: a result of one could be an argument of another, though one call is enough.
KITS = (
    ("contact", "customer", "employee", "message", "email", "phone_of", "order_list"), ("phone_of", "customer_by_email", "message", "user", "order"),
    ("customer_by_email", "order_list", "order", "email", "contact"), ("customer", "order_list", "order", "track", "message"),
    ("weather", "time", "forecast", "flight_status", "hotel", "web_search"), ("track", "flight_status", "weather", "order", "distance"),
    ("country_info", "weather", "time", "currency", "wiki", "forecast"), ("list_folder", "read_text", "search_text", "delete_file", "shell"),
    ("list_long", "read_text", "search_text", "write_file"), ("search_file", "read_text", "list_folder", "find_file"), ("file_setting", "list_folder", "search_text", "shell"),
    ("shell", "read_text", "list_long", "web_search"), ("find_file", "read_text", "delete_file", "list_folder"), ("define", "synonym", "translate", "wiki", "web_search"),
    ("define", "translate", "web_search", "note"), ("calc", "units", "currency", "web_search"), ("calc", "time", "weather", "note"), ("reminder", "event", "task", "timer", "agenda"),
    ("reminder", "weather", "calc", "message"), ("note_search", "wiki", "web_search", "translate", "define"), ("news", "web_search", "wiki", "translate"),
    ("weather", "calc", "read_text", "web_search", "reminder"), ("time", "weather", "calc", "translate"), ("restaurant", "hotel", "distance", "weather", "recipe"),
)  # fmt: skip

CHAINS = [
    Chain("customer_by_email", "id", "order_list", "customer",
        imp="[find|look up] the customer [with [the |]email|whose email is] {email} and [list|show me|tell me] [what they ordered|what they bought|their orders|all their orders]|[list|show|get] [the |all |][orders|purchases] of the customer [with [the |]email|whose email is|using] {email}|[look up|pull up] {email} and [show|list] [the|their] orders",
        ask="[which|what] orders [belong to|come from|has] the customer with [the |]email {email}|what did the customer [with [the |]email|behind|whose address is] {email} [order|buy]|what has {email} ordered from us|does {email} have any orders"),
    Chain("customer", "id", "order_list", "customer",
        imp="[find|look up] [the customer |]{name} and [list|show me|tell me] [what they ordered|their orders|all orders of theirs]|[list|show|get] [the |all |][orders|purchases] of [our customer |the customer |]{name}",
        ask="[which|what] orders [belong to|come from|has] [our customer |the customer |]{name}|what did [our customer |the customer |]{name} [order|buy]|what has {name} ordered from us|which orders are {name}'s"),
    Chain("phone_of", "phone", "message", "to", imp="[find|look up|get] {name}'s [phone |]number and [text|send] [it|this number]: {text}|[get|look up] the number of {name}, then [text|message] that number \"{text}\"", ask=""),
    Chain("contact", "email", "customer_by_email", "email", imp="find the email of {name} and [check|see] which customer [it belongs to|has it]", ask="which customer [number|id] goes with the email of {name}"),
    Chain("search_file", "file", "read_text", "path",
        imp="[search|look|grep] for {pattern} in {path} and [read|open|show me] the file [that has it|you find|it is in]|find [the file|out which file] in {path} [that mentions|mentions|with] {pattern} and [show me its contents|open it|read it to me|show it to me]|open whichever file in {path} [mentions|contains] {pattern}",
        ask="[one|a] file in {path} mentions {pattern}, what does [that file|it] say|which file under {path} has {pattern}, and what's in it|some file in {path} contains {pattern}, can you open it"),
    Chain("employee", "manager", "phone_of", "name", imp="find out who {name}'s [boss|manager] is and [get|look up] [their|his|her] [phone |]number", ask="what's the [phone |]number of {name}'s [boss|manager]|how can I call the [boss|manager] of {name}"),
    Chain("employee", "manager", "contact", "name", imp="look up the [boss|manager] of {name} and how to reach them", ask="how do I reach {name}'s [boss|manager]|what's the email of {name}'s [boss|manager]"),
    Chain("user", "name", "phone_of", "name", imp="find out who user {user} is and get [their|his|her] [phone |]number", ask="what's the [phone |]number of the person behind user {user}"),
    Chain("web_search", "url", "http", "url", imp="search [the web |]for {query} and open the [first|best|top] [result|page]|find a page about {query} and tell me what it says", ask="what does the best page about {query} say"),
    Chain("find_file", "path", "read_text", "path", imp="find {name} and [read it|show me what's in it|open it]|locate [the file |]{name}, then [read|show] it", ask="where is {name} and what does it say|there is a {name} somewhere, what's inside"),
    Chain("find_file", "path", "delete_file", "path", imp="find {name} and [delete|remove] it", ask="{name} has to go, wherever it is, [can you delete it|please remove it]"),
    Chain("track", "place", "weather", "city", imp="find out where [parcel|package] {number} is and how the weather is there", ask="what's the weather like where [my parcel|package] {number} is"),
    Chain("country_info", "capital", "weather", "city", imp="find the capital of {country} and check the weather there", ask="how's the weather in the capital of {country}"),
    Chain("country_info", "capital", "time", "city", imp="find the capital of {country} and tell me the time there", ask="what time is it in {country}'s capital"),
    Chain("note_search", "text", "translate", "text", imp="find my note about {query} and translate it into {language}", ask="what's my note on {query} in {language}"),
    Chain("synonym", "synonym", "define", "word", imp="find a synonym for {word} and define that", ask="what does a synonym of {word} mean"),
]  # fmt: skip
