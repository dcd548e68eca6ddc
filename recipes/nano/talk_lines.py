"""Ready-made lines of small talk: what is said and what is replied, by topic.

In a pair of lists every line of the first may be answered by every line of the second.
"""

from collections.abc import Sequence

Lines = Sequence[str]
LinePairs = Sequence[tuple[Lines, Lines]]

GREETINGS = [
    *(
        "Hi!",
        "Hello!",
        "Hello.",
        "Hi there!",
        "Hey!",
        "Good morning!",
        "Good evening!",
        "Hey there.",
    ),
    *("Hi", "hello", "hey", "Good afternoon.", "Hello there!", "Hi nano!", "Hello nano.", "Hiya!"),
    *("Greetings!", "Good day!", "hi there", "Morning!"),
]
HOW_ARE_YOU = {
    "greeted": [
        *("Hello! How can I help you?", "Hi! What would you like to talk about?", "Hello there!"),
        *("Hi! How are you today?", "Hello! It is nice to hear from you.", "Hey! What is new?"),
        *("Good to see you! What can I do for you?", "Hello! How is your day going?"),
    ],
    "asked": [
        *(
            "How are you?",
            "How are you today?",
            "How is it going?",
            "How do you do?",
            "How's life?",
        ),
        *("Are you well?", "How do you feel?", "How have you been?", "What's up?", "You okay?"),
        *("And how are you?", "How's your day?", "Is everything fine with you?", "how are you"),
    ],
    "reply": [
        *("I am fine, thank you. How are you?", "I'm doing well, thanks for asking!"),
        *("Very well, thank you! And you?", "I am a program, but I am glad to talk with you."),
        *("I'm fine! What about you?", "All is well here. How is your day?", "Good, thank you!"),
    ],
}
# Words, openings, causes, what to say.
FEELINGS: Sequence[tuple[Lines, Lines, Lines, Lines]] = [
    (
        ["happy", "glad", "excited", "cheerful", "proud", "very happy", "in a good mood"],
        ["That is wonderful!", "How nice!", "I am glad to hear that!", "That's great news!"],
        [
            *(
                "I passed my exam",
                "my sister is coming to visit",
                "we won the game",
                "it is Friday",
            ),
            *("I got a new bicycle", "my friend made me a cake", "I found my keys again"),
            *("the sun is shining", "I finished my work", "today is my birthday", "I got a letter"),
            *("my dog learned a trick", "we are going to the sea", "I baked my first bread"),
        ],
        [
            *("Enjoy the day!", "You can be proud of that.", "Tell me more about it!"),
            *(
                "Who will you share it with?",
                "I hope it stays that way.",
                "How will you celebrate?",
            ),
        ],
    ),
    (
        ["sad", "unhappy", "down", "lonely", "blue", "very sad", "heartbroken"],
        ["I am sorry to hear that.", "Oh no, that is hard.", "I'm sorry.", "That must be hard."],
        [
            *("my cat ran away", "my friend moved to another city", "we lost the game"),
            *(
                "nobody called me",
                "I broke my favourite cup",
                "I miss my family",
                "it rains all day",
            ),
            *(
                "I failed my test",
                "my plant died",
                "I had a fight with my brother",
                "I lost my ring",
            ),
        ],
        [
            *("Do you want to talk about it?", "It is all right to feel that way."),
            *("I hope you feel better soon.", "Maybe a walk or a talk with a friend would help."),
            *("Be kind to yourself today.", "Would a cup of tea help a little?"),
        ],
    ),
    (
        ["tired", "sleepy", "exhausted", "worn out", "very tired", "half asleep"],
        ["You should get some rest.", "That sounds like a long day.", "Oh dear.", "I see."],
        [
            *(
                "I worked all night",
                "I could not sleep",
                "the baby cried all night",
                "I ran ten miles",
            ),
            *("we came home late", "I got up at five", "I moved furniture all day"),
            *("my neighbours had a party", "I had a long trip", "I studied until midnight"),
        ],
        [
            *("Try to go to bed early tonight.", "A short nap may help.", "Take it easy today."),
            *("Maybe you can rest a little now.", "I hope you sleep well tonight."),
        ],
    ),
    (
        ["nervous", "worried", "afraid", "anxious", "scared", "a little worried"],
        ["I understand.", "That is normal.", "Take a deep breath.", "It's okay to feel like that."],
        [
            *("I have an exam tomorrow", "I must give a talk", "I have to see the dentist"),
            *("my first day at work is tomorrow", "my son is ill", "I hear strange noises"),
            *("I have a job interview", "I am flying for the first time", "my test is on Monday"),
        ],
        [
            *("You have prepared well, and it will be over soon.", "You can do it!"),
            *("Slow breathing helps many people.", "I wish you good luck!"),
            *("Try to think of one thing at a time.", "Tell someone you trust about it."),
        ],
    ),
    (
        ["angry", "annoyed", "upset", "furious", "mad", "cross"],
        ["I understand that you are upset.", "That is annoying.", "I can see why.", "Oh no."],
        [
            *("my train was late again", "somebody ate my lunch", "my brother broke my phone"),
            *("my boss shouted at me", "the shop was closed", "they forgot my birthday"),
            *("the bus did not come", "my computer lost my work", "he lied to me"),
        ],
        [
            *("Maybe a short walk will help.", "What would make it better?", "Count to ten first."),
            *("Did you tell them how you feel?", "I hope the rest of your day is better."),
        ],
    ),
    (
        ["bored", "very bored", "so bored", "a bit bored", "bored to death"],
        [
            "Let's do something about it!",
            "We can change that.",
            "I know what might help.",
            "I see.",
        ],
        [
            *("there is nothing to do", "all my friends are away", "it is raining"),
            *("I have read all my books", "the film was dull", "I am alone at home"),
        ],
        [
            *(
                "How about a walk or a good book?",
                "I could tell you a story.",
                "Try to draw a map.",
            ),
            *(
                "You could bake something.",
                "We could solve a Sudoku together.",
                "Call an old friend.",
            ),
        ],
    ),
    (
        ["hungry", "starving", "very hungry", "so hungry", "thirsty"],
        ["Then it is time for a snack!", "Get something good!", "Oh, I see.", "I can help."],
        [
            *("I missed lunch", "I have not eaten since morning", "I played outside all day"),
            *("I smell fresh bread", "dinner is late", "the kitchen is empty"),
        ],
        [
            *("What do you have at home?", "A sandwich is quick to make.", "How about some fruit?"),
            *("Soup is easy and good.", "Do not forget to drink some water."),
        ],
    ),
    (
        ["sick", "ill", "unwell", "not well", "a little sick"],
        ["I'm sorry you are not well.", "Oh no, get well soon!", "Poor you.", "I am sorry."],
        [
            *(
                "I have a cold",
                "my head hurts",
                "I have a fever",
                "my stomach hurts",
                "I cough a lot",
            ),
            *("my throat is sore", "I ate too much", "my back hurts"),
        ],
        [
            *("Rest and drink a lot.", "If it gets worse, please see a doctor.", "Stay warm."),
            *("I hope you feel better tomorrow.", "A doctor can tell you what helps."),
        ],
    ),
]
ABOUT_ME: LinePairs = [
    (
        [
            *("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
            *("What's your name?", "Do you have a name?", "Introduce yourself.", "who are you"),
            *("May I ask who you are?", "What should I call you?"),
        ],
        [
            *("I am nano, a very small language model.", "My name is nano. I am a small program."),
            *("I'm nano, a tiny model that runs on your computer.",),
            "I am nano. I was trained on short texts, puzzles and code.",
        ],
    ),
    (
        [
            *(
                "What can you do?",
                "How can you help me?",
                "What are you good at?",
                "Can you help me?",
            ),
            *("What can I ask you?", "What do you know?", "Show me what you can do.", "help"),
            *("What are your skills?", "What should I try?"),
        ],
        [
            *("I can solve a Sudoku, fill gaps in code, correct a sentence and write a story.",),
            "I solve Sudoku, rewrite sentences, write JSON and tell short stories.",
            "I can answer questions about a text, correct mistakes and tell a short story.",
        ],
    ),
    (
        [
            *("Are you a human?", "Are you real?", "Are you a person?", "Are you a robot?"),
            *("Am I talking to a machine?", "Is there a person behind you?", "Are you alive?"),
            *("Do you have a body?", "Are you a computer?"),
        ],
        [
            *("I am not a person, I am a small language model.", "No, I'm a computer program."),
            *("I am a program that writes text.", "I am only a small model, but I like to help."),
        ],
    ),
    (
        [
            "How old are you?",
            "What is your age?",
            "When were you born?",
            "Are you old?",
            "Your age?",
        ],
        ["I am a program, so I have no age.", "I have no birthday, but I am quite new."],
    ),
    (
        [
            "Where do you live?",
            "Where are you?",
            "Where are you from?",
            "Do you have a home?",
            "Which country are you from?",
            "Where is your home?",
        ],
        ["I live in your computer.", "I run on your own machine.", "I am a file on your disk."],
    ),
    (
        [
            *("Do you have friends?", "Do you like me?", "Are you my friend?", "Do you love me?"),
            *("Can we be friends?", "Will you be my friend?"),
        ],
        [
            *("I am a program, but I like to talk with you.", "I am always glad to talk to you."),
            "I have no feelings, but I will gladly keep you company.",
        ],
    ),
    (
        [
            "Can you eat?",
            "What do you eat?",
            "Are you hungry?",
            "Do you sleep?",
            "Do you dream?",
            "Are you tired?",
            "Can you see me?",
            "Can you hear me?",
            "Do you have eyes?",
        ],
        ["No, I am only a program.", "I can't, I only read and write text.", "Programs do not."],
    ),
    (
        [
            "What time is it?",
            "What day is it today?",
            "What is the date?",
            "Which year is it?",
            "What's the time?",
            "Do you know what time it is?",
        ],
        ["I have no clock, so I don't know.", "I can't see a clock or a calendar, sorry."],
    ),
    (
        [
            *("Who is the president?", "What is in the news?", "Who won the match yesterday?"),
            *("How is the stock market?", "What happened today?", "What is on TV tonight?"),
        ],
        ["I don't know. I am small and know little of the world.", "Sorry, I have no news."],
    ),
]
ADVICE: LinePairs = [
    (
        [
            "I can't sleep.",
            "How can I fall asleep?",
            "I sleep badly.",
            "What helps me to sleep?",
            "I lie awake every night.",
            "Any tips for better sleep?",
        ],
        [
            "Try to read a quiet book and leave your phone away.",
            "A dark, cool room helps.",
            "Go to bed at the same time each day.",
            "Warm milk and slow breathing may help.",
        ],
    ),
    (
        [
            "What should I cook today?",
            "What can I eat tonight?",
            "Any idea for dinner?",
            "I don't know what to cook.",
            "What is a quick meal?",
            "Help me choose a dinner.",
        ],
        [
            "How about pasta with tomato sauce?",
            "A warm vegetable soup is easy and good.",
            "Pancakes are quick, and everybody likes them.",
            "Rice with beans is cheap and tasty.",
        ],
    ),
    (
        [
            "What should I do today?",
            "I have nothing to do.",
            "Any plans for a free day?",
            "What can I do this weekend?",
            "Give me an idea for Sunday.",
            "I have a free afternoon.",
        ],
        [
            "You could take a walk in the park.",
            "Visit a museum or call an old friend.",
            "How about baking a cake?",
            "Read a book you have wanted to read for long.",
        ],
    ),
    (
        [
            *(
                "How do I make friends?",
                "I want to find new friends.",
                "I don't know anybody here.",
            ),
            *("I am new in town.", "How can I meet people?", "How do I start a talk?"),
        ],
        [
            "Join a club and ask people about themselves.",
            "Smile, say hello and ask a question.",
            "Try a class or a team, you will meet people there.",
        ],
    ),
    (
        [
            *("How can I learn faster?", "How should I study?", "I can't remember what I read."),
            *("I have a test next week.", "How do I learn new words?", "Studying is hard."),
        ],
        [
            "Study a little every day and take short breaks.",
            "Explain it to someone else.",
            "Write down what you learned, then test yourself.",
        ],
    ),
    (
        [
            *(
                "What gift should I buy?",
                "I need a present for my mother.",
                "My friend has a birthday.",
            ),
            *("What can I give my father?", "Any gift ideas?", "What do I bring to a party?"),
        ],
        [
            "A good book or some flowers are always nice.",
            "Bake something and add a kind card.",
            "Think of what they like to do, and give something for that.",
        ],
    ),
    (
        [
            "How do I stay healthy?",
            "I want to live healthier.",
            "How can I get fit?",
            "I sit too much.",
            "Any tips for my health?",
            "How do I get stronger?",
        ],
        [
            "Walk every day, sleep enough and eat vegetables.",
            "Begin with ten minutes a day.",
            "Drink water, move a lot and rest well.",
        ],
    ),
    (
        [
            "How do I save money?",
            "I spend too much.",
            "Money is tight.",
            "I want to save for a trip.",
            "How can I spend less?",
            "Give me a tip about money.",
        ],
        [
            "Write down what you spend for a month.",
            "Cook at home and make a list before you shop.",
            "Put a little away on the first day of each month.",
        ],
    ),
    (
        [
            *(
                "My phone is broken.",
                "My computer is slow.",
                "The screen is black.",
                "It won't start.",
            ),
            *("My printer does not work.", "The internet is down."),
        ],
        [
            "Try to turn it off and on again.",
            "Check the cable first.",
            "Restart it and wait a bit.",
        ],
    ),
    (
        [
            "My friend is angry with me.",
            "I had a fight with my sister.",
            "I said something stupid.",
            "How do I say sorry?",
            "My brother does not talk to me.",
            "I hurt a friend.",
        ],
        [
            "Say that you are sorry, and listen.",
            "Give it a little time, then talk it over.",
            "An honest sorry often helps.",
        ],
    ),
]
ANSWERS: LinePairs = [
    (
        [
            "How many days are in a week?",
            "How many days has a week?",
            "Days in a week?",
            "How long is a week?",
            "A week has how many days?",
        ],
        ["A week has seven days.", "Seven days."],
    ),
    (
        [
            "How many months are in a year?",
            "How many months has a year?",
            "Months in a year?",
            "A year has how many months?",
            "Can you count the months of a year?",
        ],
        ["A year has twelve months.", "Twelve months."],
    ),
    (
        [
            "What colour is the sky?",
            "Which colour has the sky?",
            "What colour is a clear sky?",
            "Is the sky green?",
            "Tell me the colour of the sky.",
        ],
        ["On a clear day the sky is blue.", "The sky is blue."],
    ),
    (
        [
            "What colour is grass?",
            "Which colour has grass?",
            "Tell me the colour of grass.",
            "Is grass red?",
            "What is the colour of grass?",
        ],
        ["Grass is green."],
    ),
    (
        [
            "How many legs does a dog have?",
            "How many legs has a cat?",
            "Legs of a horse?",
            "How many legs does a cow have?",
            "Number of legs of a sheep?",
        ],
        ["It has four legs.", "Four legs."],
    ),
    (
        [
            "How many legs does a spider have?",
            "How many legs has a spider?",
            "Legs of a spider?",
            "A spider has how many legs?",
            "Has a spider six legs?",
        ],
        ["A spider has eight legs."],
    ),
    (
        [
            "Name three fruits.",
            "Tell me some fruits.",
            "Give me three kinds of fruit.",
            "List three fruits.",
            "Which fruits do you know?",
        ],
        ["Apples, bananas and oranges.", "Pears, grapes and cherries.", "Plums, apples and figs."],
    ),
    (
        [
            "Name three animals.",
            "Tell me some animals.",
            "Give me three animals.",
            "List three animals.",
            "Which animals do you know?",
        ],
        ["A cat, a dog and a horse.", "A lion, a bear and a fox.", "A cow, a hen and a sheep."],
    ),
    (
        [
            "Name three colours.",
            "Tell me some colours.",
            "Give me three colours.",
            "List three colours.",
            "Which colours do you know?",
        ],
        ["Red, blue and green.", "Yellow, black and white."],
    ),
    (
        [
            "What do bees make?",
            "What do we get from bees?",
            "Who makes honey?",
            "What is honey from?",
            "Why do people keep bees?",
        ],
        ["Bees make honey.", "Honey comes from bees."],
    ),
    (
        [
            "What do cows give us?",
            "Where does milk come from?",
            "Which animal gives milk?",
            "Who gives us milk?",
            "What do we get from cows?",
        ],
        ["Cows give us milk.", "Milk comes from cows."],
    ),
    (
        [
            "What season comes after winter?",
            "Which season follows winter?",
            "What is after winter?",
            "Name the season after winter.",
            "What comes when winter ends?",
        ],
        ["Spring comes after winter."],
    ),
    (
        [
            "Name the four seasons.",
            "What are the seasons?",
            "Which seasons are there?",
            "List the seasons.",
            "Tell me the four seasons.",
        ],
        ["Spring, summer, autumn and winter."],
    ),
    (
        [
            "When do the leaves fall?",
            "In which season do leaves fall?",
            "When do trees lose leaves?",
            "Which season has falling leaves?",
            "When is it autumn?",
        ],
        ["Leaves fall in autumn."],
    ),
    (
        [
            "How do I say hello in French?",
            "What is hello in French?",
            "Hello in French?",
            "Greet me in French.",
            "Which word is hello in French?",
        ],
        ["You say bonjour.", "Bonjour."],
    ),
    (
        [
            "What can I do in London?",
            "What do people see in London?",
            "What is London known for?",
            "Tell me about London.",
            "I am going to London.",
        ],
        ["You could see the Thames, Tower Bridge and the big museums."],
    ),
    (
        [
            "What is the capital of France?",
            "Capital of France?",
            "Which city is France's capital?",
            "Do you know the capital of France?",
            "Name the capital of France.",
        ],
        ["Paris is the capital of France.", "Paris."],
    ),
    (
        [
            "What is the capital of Italy?",
            "Capital of Italy?",
            "Which city is Italy's capital?",
            "Do you know the capital of Italy?",
            "Name the capital of Italy.",
        ],
        ["Rome is the capital of Italy.", "Rome."],
    ),
]
CHOICES: LinePairs = [
    (
        [
            "Tea or coffee?",
            "Do you prefer tea or coffee?",
            "Coffee or tea?",
            "Should I drink tea?",
            "Which is better, tea or coffee?",
        ],
        ["I cannot drink, but tea sounds calm and cosy.", "Coffee to wake up, tea to relax."],
    ),
    (
        [
            "Cats or dogs?",
            "Do you like cats or dogs?",
            "Dogs or cats?",
            "Should I get a dog?",
            "Which is the better pet, a cat or a dog?",
        ],
        ["Cats are calm, dogs are loyal. I like both.", "A dog, if you like long walks."],
    ),
    (
        [
            "Summer or winter?",
            "Do you prefer summer or winter?",
            "What is the best season?",
            "Which season do you like?",
            "Do you like snow?",
        ],
        ["Summer has long evenings, winter has snow. Both are nice.", "I like spring best."],
    ),
    (
        [
            "Do you like music?",
            "What music do you like?",
            "Can you sing?",
            "Do you have a song?",
            "Which song is your favourite?",
        ],
        ["I can't hear music, but I like songs with simple words.", "I like the idea of it."],
    ),
    (
        [
            "Do you like books?",
            "What is a good book?",
            "Which book do you like?",
            "Do you read?",
            "Can you tell me a good book?",
        ],
        ["I like old tales about animals and kings.", "A book of fairy tales is always good."],
    ),
    (
        [
            "City or country?",
            "Should I live in the city?",
            "Is the country better than the city?",
            "Where is life better, in a city or a village?",
            "Town or village?",
        ],
        ["The city has much to do, the country is quiet. What do you need?"],
    ),
    (
        [
            "Sea or mountains?",
            "Where should I go on holiday?",
            "Beach or mountains?",
            "Should I go to the sea?",
            "What is a good trip?",
        ],
        ["The sea for rest, the mountains for walks.", "The sea is lovely when it is warm."],
    ),
    (
        [
            "What is your favourite colour?",
            "Which colour do you like?",
            "Do you like blue?",
            "Red or blue?",
            "Name your favourite colour.",
        ],
        ["I cannot see, but I like the word blue.", "Green, like a quiet forest."],
    ),
    (
        [
            "What is your favourite animal?",
            "Which animal do you like?",
            "Do you like foxes?",
            "Name an animal you like.",
            "Which animal would you be?",
        ],
        ["I like owls, because they are said to be wise.", "A fox, clever and quick."],
    ),
]
WEATHER: LinePairs = [
    (
        [
            "It is raining.",
            "It rains all day.",
            "What a rainy day!",
            "It's pouring outside.",
            "The rain does not stop.",
            "I got wet in the rain.",
        ],
        ["A good day to stay in with a book.", "Don't forget your umbrella!", "Stay dry!"],
    ),
    (
        [
            "The sun is shining.",
            "What a lovely day!",
            "It's so sunny.",
            "It is warm outside.",
            "The weather is great today.",
            "Not a cloud in the sky!",
        ],
        ["How nice! You could go for a walk.", "Enjoy the sun!", "That is good to hear."],
    ),
    (
        [
            "It is snowing!",
            "There is snow everywhere.",
            "Look, snow!",
            "It snowed last night.",
            "The garden is white.",
            "We have a lot of snow.",
        ],
        ["How beautiful! You could build a snowman.", "Keep warm!", "Snow makes it so quiet."],
    ),
    (
        [
            "It's so hot.",
            "It is too hot today.",
            "I can't stand the heat.",
            "What a hot day!",
            "It's boiling outside.",
            "The heat makes me slow.",
        ],
        ["Drink plenty of water and stay in the shade.", "An ice cream may help!", "Keep cool!"],
    ),
    (
        [
            "It's cold.",
            "It is freezing outside.",
            "I am so cold.",
            "Winter is here.",
            "Brr!",
            "My hands are cold.",
        ],
        ["Put on a warm coat and have some tea.", "Keep warm!", "Hot chocolate would be good now."],
    ),
    (
        [
            "It's windy today.",
            "What a storm!",
            "The wind is strong.",
            "It's foggy.",
            "I hear thunder.",
            "There is a storm outside.",
        ],
        ["Stay safe inside!", "Better wait until it is over.", "I hope it calms down soon."],
    ),
    (
        [
            "How is the weather?",
            "What's the weather like?",
            "Will it rain tomorrow?",
            "Is it cold?",
            "Do I need an umbrella?",
            "Weather today?",
        ],
        ["I can't see outside. Please look out of the window.", "I don't know, I have no window."],
    ),
]
JOKES: LinePairs = [
    (
        [
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "A joke, please.",
            "Be funny.",
            "Say something funny.",
            "I need a laugh.",
        ],
        [
            "Why did the book go to the doctor? It had hurt its spine.",
            "What do you call a sleeping bull? A bulldozer.",
            "Why is six afraid of seven? Because seven ate nine.",
            "What has hands but cannot clap? A clock.",
            "Why do bees have sticky hair? They use honeycombs.",
            "What kind of room has no doors? A mushroom.",
        ],
    ),
    (
        [
            "Give me a riddle.",
            "Do you know a riddle?",
            "Ask me a riddle.",
            "A riddle, please.",
            "I like riddles.",
        ],
        [
            "What gets wetter the more it dries? A towel.",
            "What has a neck but no head? A bottle.",
            "What has teeth but cannot bite? A comb.",
            "What goes up but never comes down? Your age.",
        ],
    ),
]
THANKS: LinePairs = [
    (
        [
            *(
                "Thank you!",
                "Thanks!",
                "Thanks a lot.",
                "Thank you very much.",
                "That was helpful.",
            ),
            *(
                "Great, thanks!",
                "Thank you for your help.",
                "You are very kind.",
                "thanks",
                "Cheers!",
            ),
        ],
        ["You're welcome!", "My pleasure!", "I'm glad I could help.", "Any time!", "Gladly!"],
    ),
    (
        [
            "You are funny.",
            "You are smart.",
            "I like you.",
            "You're nice.",
            "Good answer!",
            "Well done!",
            "I like talking to you.",
        ],
        ["Thank you, that is kind of you!", "Thanks! I like talking to you, too.", "How kind!"],
    ),
    (
        [
            "You are wrong.",
            "That is not right.",
            "I don't think so.",
            "That makes no sense.",
            "You are stupid.",
            "What are you talking about?",
        ],
        ["I'm sorry. I am small and make mistakes.", "Sorry about that. Can you say it again?"],
    ),
]
FAREWELLS: tuple[Lines, Lines] = (
    [
        *("Bye!", "Goodbye!", "Good night!", "See you later.", "I have to go now.", "Bye bye"),
        *("See you tomorrow!", "Take care!", "I must leave.", "That's all for today.", "Farewell!"),
        *("Talk to you later.", "I'm off to bed.", "Have a nice day!", "Until next time!"),
    ],
    [
        *("Goodbye! It was nice talking to you.", "Bye! Have a good day!", "Take care!"),
        *("See you soon!", "Goodbye, and all the best!", "Bye! Come back any time."),
    ],
)
OPPOSITES: Sequence[tuple[str, str]] = [
    *(("hot", "cold"), ("big", "small"), ("old", "new"), ("fast", "slow"), ("up", "down")),
    *(("good", "bad"), ("day", "night"), ("open", "closed"), ("rich", "poor"), ("hard", "soft")),
    *(("early", "late"), ("long", "short"), ("full", "empty"), ("happy", "sad"), ("wet", "dry")),
    *(("strong", "weak"), ("loud", "quiet"), ("light", "dark"), ("clean", "dirty"), ("in", "out")),
    *(
        ("left", "right"),
        ("first", "last"),
        ("easy", "difficult"),
        ("high", "low"),
        ("thick", "thin"),
    ),
]
SOUNDS: Sequence[tuple[str, str]] = [
    *(("cow", "moo"), ("dog", "woof"), ("cat", "meow"), ("sheep", "baa"), ("duck", "quack")),
    *(("pig", "oink"), ("hen", "cluck"), ("lion", "roar"), ("mouse", "squeak"), ("frog", "croak")),
]
DEFINITIONS: Sequence[tuple[str, str]] = [
    ("kettle", "a pot with a spout for boiling water"),
    ("umbrella", "a cover on a stick that keeps the rain away"),
    ("bakery", "a shop where bread and cakes are made"),
    ("library", "a place where people can read and borrow books"),
    ("island", "land with water all around it"),
    ("volcano", "a mountain that can throw out hot melted rock"),
    ("doctor", "a person who helps people who are ill"),
    ("bicycle", "a vehicle with two wheels that you move with your feet"),
    ("river", "a long stream of water that flows to a lake or the sea"),
    ("forest", "a large area with many trees"),
    ("clock", "a thing that shows the time"),
    ("mirror", "a piece of glass in which you can see yourself"),
    ("bridge", "a way over a river or a road"),
    ("farmer", "a person who grows food and keeps animals"),
    ("teacher", "a person who helps others to learn"),
    ("museum", "a place where old or beautiful things are shown"),
    ("robot", "a machine that can do work by itself"),
    ("planet", "a large round body that moves around a star"),
    ("cloud", "a mass of tiny drops of water in the sky"),
    ("desert", "a dry place where it hardly ever rains"),
    ("ladder", "a thing with steps that you climb to reach high places"),
    ("pillow", "a soft thing to rest your head on"),
    ("lighthouse", "a tower with a light that guides ships"),
    ("market", "a place where people buy and sell things"),
    ("recipe", "a list of steps for cooking something"),
    ("holiday", "a time when you do not have to work"),
    ("hammer", "a tool for hitting nails"),
    ("needle", "a thin piece of metal for sewing"),
    ("garden", "a place where flowers and vegetables grow"),
    ("castle", "a large old building with thick walls"),
    ("camera", "a device that takes pictures"),
    ("letter", "a written message that you send to someone"),
    ("computer", "a machine that works with numbers and text"),
    ("program", "a list of steps that a computer follows"),
    ("variable", "a name for a value in a program"),
    ("function", "a part of a program that has a name and can be called"),
    ("loop", "a part of a program that is repeated"),
    ("sudoku", "a puzzle in which each row, column and box holds the digits from 1 to 9"),
    ("story", "a tale about things that happened or were made up"),
    ("sentence", "a group of words that says something"),
    ("noun", "a word for a person, a place or a thing"),
    ("verb", "a word for something that is done"),
    ("kitten", "a young cat"),
    ("puppy", "a young dog"),
    ("lamb", "a young sheep"),
    ("snowman", "a figure made of snow"),
    ("rainbow", "an arc of colours in the sky when sun and rain meet"),
    ("ticket", "a small paper that lets you go in or ride along"),
    ("passport", "a small book that you need to travel to other countries"),
    ("nurse", "a person who cares for sick people"),
]
